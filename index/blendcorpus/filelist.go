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

// A File is one token file of a blend. Its prefix is its path without .bin and .idx. Weights need
// not sum to 1. Either all files of a blend have a corpus or no file has one.
type File struct {
	Weight         float64
	Prefix, Corpus string
}

// ParseFileList reads a file of lines "weight prefix corpus", or for a flat blend "weight prefix".
// It skips empty lines, splits words like Python's str.split, and parses weights like Python's
// float. Errors name the line.
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
			err = errors.New("only some lines have a corpus; give every file a corpus, or no file")
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
		return File{}, fmt.Errorf("%d words, want a weight, a prefix and a corpus; write it like 1.0 "+
			"/data/web_text_document web",
			len(words))
	}
	weight, ok := python.ParseFloat(words[0])
	if !ok {
		return File{}, fmt.Errorf("invalid weight %q; use a number", words[0])
	}
	f := File{Weight: weight, Prefix: words[1]}
	if len(words) == 3 {
		f.Corpus = words[2]
	}
	return f, nil
}

// ParseDataPath reads the words of Megatron-DeepSpeed's --data-path: pairs of weight and prefix for
// a flat blend, or a single prefix. For a single prefix, plain is true; see [Config.Plain].
func ParseDataPath(words []string) (files []File, plain bool, err error) {
	switch {
	case len(words) == 1:
		f := File{Weight: 1, Prefix: words[0]}
		return []File{f}, true, f.check(true)
	case len(words) == 0 || len(words)%2 == 1:
		return nil, false, fmt.Errorf("%d words; give pairs of weight and prefix, or a single prefix", len(words))
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

// space reports whether Python's str.split splits at r: Unicode white space and the four
// information separators.
func space(r rune) bool { return unicode.IsSpace(r) || r >= 0x1c && r <= 0x1f }

// check rejects names that no description can hold and weights that no blend can use.
func (f File) check(flat bool) error {
	switch {
	case f.Prefix == "":
		return errors.New("the prefix is empty")
	case !utf8.ValidString(f.Prefix) || !utf8.ValidString(f.Corpus) ||
		strings.ContainsAny(f.Prefix+f.Corpus, "\r\n\x00"):
		return fmt.Errorf("invalid name %q; use UTF-8 without line breaks", f.Prefix+" "+f.Corpus)
	case !(f.Weight >= 0) || math.IsInf(f.Weight, 0):
		return fmt.Errorf("the weight of %s is %s; use a finite number of 0 or more", f.Prefix,
			python.Float(f.Weight))
	case flat != (f.Corpus == ""):
		return fmt.Errorf("%s: give every file a corpus, or no file", f.Prefix)
	}
	return nil
}

// normalized returns the weights divided by their sum. The sum is computed from left to right,
// unlike numpy's.
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

// share returns the number of samples with which a file in a blend of n is built: 0.5 % more than n
// times its weight, rounded up once after two float64 products.
func share(n int64, weight float64) (int64, error) {
	part := float64(float64(n)*weight) * 1.005
	if part = math.Ceil(part); !(part < 1<<53) {
		return 0, fmt.Errorf("%d samples times the weight %s cannot be counted exactly; request fewer samples", n,
			python.Float(weight))
	}
	return int64(part), nil
}
