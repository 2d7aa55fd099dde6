package blendcorpus

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"unicode"
	"unicode/utf8"

	"mula/index/python"
)

// A File is one token file of a blend, by prefix: its name without .bin and .idx. Weights need not
// sum to 1. Either all files of a blend have a corpus or none.
type File struct {
	Weight         float64
	Prefix, Corpus string
}

// ParseFileList reads a file of lines "weight prefix corpus", or for a flat blend "weight prefix".
// Empty lines are passed over. Words are divided as Python's str.split does, and a weight is what
// its float reads. Errors name the line.
func ParseFileList(text string) ([]File, error) {
	var files []File
	text = strings.ReplaceAll(strings.ReplaceAll(text, "\r\n", "\n"), "\r", "\n")
	for number, line := range strings.Split(text, "\n") {
		words := strings.FieldsFunc(line, space)
		if len(words) == 0 {
			continue
		}
		f, err := parseFile(words)
		if err == nil {
			err = f.check(f.Corpus == "")
		}
		if err == nil && len(files) > 0 && (f.Corpus == "") != (files[0].Corpus == "") {
			err = errors.New("this line and the first differ in having a corpus: give every file one, or none")
		}
		if err != nil {
			return nil, fmt.Errorf("line %d of the file list: %w", number+1, err)
		}
		files = append(files, f)
	}
	if len(files) == 0 {
		return nil, errors.New("the file list is empty; it should have lines like: 1.0 /data/web_text_document web")
	}
	return files, nil
}

func parseFile(words []string) (File, error) {
	if len(words) != 2 && len(words) != 3 {
		return File{}, fmt.Errorf("%d words; want a weight, a prefix and a corpus: 1.0 /data/web_text_document web",
			len(words))
	}
	weight, ok := python.ParseFloat(words[0])
	if !ok {
		return File{}, fmt.Errorf("the weight %q is not a number", words[0])
	}
	f := File{Weight: weight, Prefix: words[1]}
	if len(words) == 3 {
		f.Corpus = words[2]
	}
	return f, nil
}

// ParseDataPath reads the words of Megatron-DeepSpeed's --data-path: pairs of weight and prefix for
// a flat blend, or one prefix, for which plain is true; see [Config.Plain].
func ParseDataPath(words []string) (files []File, plain bool, err error) {
	switch {
	case len(words) == 1:
		f := File{Weight: 1, Prefix: words[0]}
		return []File{f}, true, f.check(true)
	case len(words) == 0 || len(words)%2 == 1:
		return nil, false, fmt.Errorf("%d words; want pairs of weight and prefix, or one prefix", len(words))
	}
	for i := 0; i < len(words); i += 2 {
		f, err := parseFile(words[i : i+2])
		if err == nil {
			f.Prefix = strings.TrimFunc(f.Prefix, space)
			err = f.check(true)
		}
		if err != nil {
			return nil, false, fmt.Errorf("pair %d: %w", i/2+1, err)
		}
		files = append(files, f)
	}
	return files, false, nil
}

// space says what Python's str.split divides at: the white space of Unicode and the four
// information separators.
func space(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }

// check refuses what no description could hold or no blend could use.
func (f File) check(flat bool) error {
	switch {
	case f.Prefix == "":
		return errors.New("the prefix is empty")
	case !utf8.ValidString(f.Prefix) || !utf8.ValidString(f.Corpus) ||
		strings.ContainsAny(f.Prefix+f.Corpus, "\r\n\x00"):
		return fmt.Errorf("%q: names are UTF-8 and on one line", f.Prefix+" "+f.Corpus)
	case !(f.Weight >= 0) || math.IsInf(f.Weight, 0):
		return fmt.Errorf("the weight of %s is %s; weights are finite numbers of 0 or more", f.Prefix,
			python.Float(f.Weight))
	case flat != (f.Corpus == ""):
		return fmt.Errorf("%s: give every file a corpus, or none", f.Prefix)
	}
	return nil
}

// normalized are the weights divided by their sum, which is taken from left to right, unlike
// numpy's.
func normalized(files []File) ([]float64, error) {
	var sum float64
	for _, f := range files {
		sum += f.Weight
	}
	if !(sum > 0) || math.IsInf(sum, 0) {
		return nil, fmt.Errorf("the weights sum to %s; at least one must be above 0", python.Float(sum))
	}
	weights := make([]float64, len(files))
	for i, f := range files {
		weights[i] = f.Weight / sum
	}
	return weights, nil
}

// share is how many samples a file of a blend of n is built with: 0.5 % more than its part, rounded
// up once, after two products of doubles.
func share(n int64, weight float64) (int64, error) {
	part := float64(float64(n)*weight) * 1.005
	if part = math.Ceil(part); !(part < 1<<53) {
		return 0, fmt.Errorf("%d samples times the weight %s are more than can be counted exactly", n,
			python.Float(weight))
	}
	return int64(part), nil
}
