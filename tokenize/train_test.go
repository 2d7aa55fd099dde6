package tokenize

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"slices"
	"strings"
	"testing"

	"mula/internal/strictjson"
	"mula/tokenize/documents"

	"pgregory.net/rapid"
)

// textDocuments yields each text as a document.
func textDocuments(texts ...string) iter.Seq2[documents.Document, error] {
	return func(yield func(documents.Document, error) bool) {
		for i, s := range texts {
			if !yield(documents.Document{Text: []byte(s), File: "texts", Line: int64(i + 1)}, nil) {
				return
			}
		}
	}
}

func trainingTexts(t testing.TB) []string {
	t.Helper()
	b, err := os.ReadFile("testdata/text.txt")
	if err != nil {
		t.Fatal(err)
	}
	return strings.Split(string(b), "\n\n")
}

// TestTrainGolden: the files are, to the byte, what Hugging Face's BpeTrainer makes of the same
// text (testdata/golden.py).
func TestTrainGolden(t *testing.T) {
	for _, p := range []Pattern{GPT2, CL100K} {
		want, err := os.ReadFile("testdata/" + p.String() + ".json")
		if err != nil {
			t.Fatal(err)
		}
		for _, workers := range []int{0, 1, 2, 7} {
			got, err := Train(context.Background(), textDocuments(trainingTexts(t)...), TrainOptions{
				VocabSize: 640, SpecialTokens: []string{"<|endoftext|>", "<|padding|>"}, Pattern: p, Workers: workers,
			})
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got, want) {
				i := 0
				for i < min(len(got), len(want)) && got[i] == want[i] {
					i++
				}
				t.Errorf("%s, %d workers: differs from byte %d on: %.80q, want %.80q", p, workers, i, got[i:], want[i:])
			}
		}
	}
}

// trainPlainly trains by counting all pairs again after each merge.
func trainPlainly(texts []string, p Pattern, merges, minFrequency int) [][2]string {
	count := map[string]int{}
	for _, s := range texts {
		for b := []byte(s); len(b) > 0; {
			n := p.scanner()(pinnedClasses(), b)
			count[string(b[:n])]++
			b = b[n:]
		}
	}
	words := map[string][]string{}
	for w := range count {
		for i := range len(w) {
			words[w] = append(words[w], string(byteRunes[w[i]]))
		}
	}
	ids := map[string]int{}
	alphabet := byteRunes
	slices.Sort(alphabet[:])
	for _, r := range alphabet {
		ids[string(r)] = len(ids)
	}
	var out [][2]string
	for len(out) < merges {
		pairs := map[[2]string]int{}
		for w, tokens := range words {
			for i := range len(tokens) - 1 {
				pairs[[2]string(tokens[i:])] += count[w]
			}
		}
		var best [2]string
		most := 0
		for pair, n := range pairs {
			if n < most {
				continue
			}
			if n > most || ids[pair[0]] < ids[best[0]] || pair[0] == best[0] && ids[pair[1]] < ids[best[1]] {
				best, most = pair, n
			}
		}
		if most < max(1, minFrequency) {
			break
		}
		out = append(out, best)
		if _, ok := ids[best[0]+best[1]]; !ok {
			ids[best[0]+best[1]] = len(ids)
		}
		for w, tokens := range words {
			for i := 0; i+1 < len(tokens); i++ {
				if tokens[i] == best[0] && tokens[i+1] == best[1] {
					tokens = slices.Replace(tokens, i, i+2, best[0]+best[1])
				}
			}
			words[w] = tokens
		}
	}
	return out
}

// TestTrainKeepsCount compares the counts kept up from merge to merge with plain counting. Letters
// are few, so that pairs overlap and repeat.
func TestTrainKeepsCount(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		texts := rapid.SliceOfN(rapid.StringOfN(rapid.SampledFrom([]rune("aab c'\n1é")), 1, 40, -1), 1, 10).Draw(t,
			"texts")
		p := rapid.SampledFrom([]Pattern{GPT2, CL100K}).Draw(t, "pattern")
		merges := rapid.IntRange(0, 25).Draw(t, "merges")
		minFrequency := rapid.IntRange(0, 3).Draw(t, "frequency")
		file, err := Train(context.Background(), textDocuments(texts...), TrainOptions{VocabSize: 256 + merges,
			Pattern: p, MinFrequency: minFrequency})
		if err != nil {
			t.Fatal(err)
		}
		var got fileJSON
		if err := strictjson.Decode(file, &got); err != nil {
			t.Fatal(err)
		}
		want := trainPlainly(texts, p, merges, minFrequency)
		for i, m := range got.Model.Merges {
			if i >= len(want) || want[i] != [2]string{m.left, m.right} {
				t.Fatalf("merge %d is %q %q, want %q", i, m.left, m.right, want)
			}
		}
		if len(got.Model.Merges) != len(want) {
			t.Fatalf("%d merges, want %q", len(got.Model.Merges), want)
		}
	})
}

func TestTrainedTokenizerWorks(t *testing.T) {
	texts := trainingTexts(t)
	for _, p := range []Pattern{GPT2, CL100K} {
		file, err := Train(context.Background(), textDocuments(texts...), TrainOptions{VocabSize: 400,
			SpecialTokens: []string{"<|endoftext|>"}, Pattern: p})
		if err != nil {
			t.Fatal(err)
		}
		tok, err := Parse(file, "trained")
		if err != nil {
			t.Fatal(err)
		}
		if got := tok.VocabSize(); got != 400 {
			t.Errorf("%d tokens, want 400", got)
		}
		if id, ok := tok.ID("<|endoftext|>"); !ok || id != 0 {
			t.Errorf("<|endoftext|> has id %d, %v", id, ok)
		}
		e := tok.NewEncoder(EncodeOptions{})
		for c := range rune(0x3000) { // every character can be spelled
			ids, err := e.Append(nil, []byte(string(c)))
			if err != nil {
				t.Fatal(err)
			}
			if back, err := tok.Decode(nil, ids); err != nil || string(back) != string(c) {
				t.Fatalf("%q comes back as %q (%v)", c, back, err)
			}
		}
	}
}

func TestTrainOptions(t *testing.T) {
	ctx := context.Background()
	train := func(opts TrainOptions, texts ...string) (*Tokenizer, error) {
		file, err := Train(ctx, textDocuments(texts...), opts)
		if err != nil {
			return nil, err
		}
		return Parse(file, "trained")
	}
	for _, c := range []struct {
		opts  TrainOptions
		texts []string
		size  int
	}{
		{TrainOptions{VocabSize: 256}, []string{"abab abab"}, 256},
		// "ab", "abab", " abab": no more pairs
		{TrainOptions{VocabSize: 1000}, []string{"abab abab"}, 259},
		{TrainOptions{VocabSize: 1000, MinFrequency: 3}, []string{"abab abab"}, 257},  // "ab" four times
		{TrainOptions{VocabSize: 1000, MaxBytes: 2}, []string{"ab", "cd", "ef"}, 257}, // "ab"
		// the document that reaches the limit counts
		{TrainOptions{VocabSize: 1000, MaxBytes: 3}, []string{"ab", "cd", "ef"}, 258},
		{TrainOptions{VocabSize: 1000, SpecialTokens: []string{"<|x|>"}}, []string{"a"}, 257}, // no pair at all
	} {
		tok, err := train(c.opts, c.texts...)
		if err != nil {
			t.Errorf("%+v: %v", c.opts, err)
		} else if got := tok.VocabSize(); got != c.size {
			t.Errorf("%+v: %d tokens, want %d", c.opts, got, c.size)
		}
	}
	for _, c := range []struct {
		opts  TrainOptions
		texts []string
		want  string
	}{
		{TrainOptions{VocabSize: 255}, []string{"a"}, "a vocabulary of 255 is not possible"},
		{TrainOptions{VocabSize: 256, SpecialTokens: []string{"<|x|>"}}, []string{"a"},
			"a vocabulary of 256 is not possible"},
		{TrainOptions{VocabSize: maxVocabulary + 1}, []string{"a"}, "is not possible"},
		{TrainOptions{VocabSize: 300, SpecialTokens: []string{""}}, []string{"a"}, "is empty"},
		{TrainOptions{VocabSize: 300, SpecialTokens: []string{"<|x|>", "<|x|>"}}, []string{"a"}, "listed twice"},
		{TrainOptions{VocabSize: 300, SpecialTokens: []string{"<|\xff|>"}}, []string{"a"}, "not valid UTF-8"},
		{TrainOptions{VocabSize: 300, SpecialTokens: []string{"word"}}, []string{"a"}, "ordinary text could become it"},
		{TrainOptions{VocabSize: 300, SpecialTokens: []string{"é"}}, []string{"a"}, `spelling of the bytes "\xe9"`},
		{TrainOptions{VocabSize: 300, SpecialTokens: []string{"Ã©"}}, []string{"é"}, `spelling of the bytes "é"`},
		{TrainOptions{VocabSize: 300, Pattern: 9}, []string{"a"}, "pattern"},
		{TrainOptions{VocabSize: 300, Workers: -1}, []string{"a"}, "invalid number of workers -1"},
		{TrainOptions{VocabSize: 300, Workers: 4097}, []string{"a"}, "invalid number of workers 4097"},
		{TrainOptions{VocabSize: 300}, nil, "no text"},
		{TrainOptions{VocabSize: 300}, []string{"ok", "a\xffb"}, "texts:2: invalid UTF-8 at byte 1"},
	} {
		if _, err := train(c.opts, c.texts...); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: %v, want %s", c.opts, err, c.want)
		}
	}
}

func TestTrainStops(t *testing.T) {
	broken := errors.New("broken stream")
	_, err := Train(context.Background(), func(yield func(documents.Document, error) bool) {
		for range 10 {
			if !yield(documents.Document{Text: bytes.Repeat([]byte("some words "), countBatch/8)}, nil) {
				return
			}
		}
		yield(documents.Document{}, broken)
	}, TrainOptions{VocabSize: 300, Workers: 2})
	if !errors.Is(err, broken) {
		t.Errorf("error of the documents: %v", err)
	}

	ctx, cancel := context.WithCancel(context.Background())
	n := 0
	_, err = Train(ctx, func(yield func(documents.Document, error) bool) {
		for { // without an end
			if n++; n == 20 {
				cancel()
			}
			if !yield(documents.Document{Text: bytes.Repeat([]byte("some words "), countBatch/8)}, nil) {
				return
			}
		}
	}, TrainOptions{VocabSize: 300, Workers: 2})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled while counting: %v", err)
	}

	ctx, cancel = context.WithCancel(context.Background())
	_, err = Train(ctx, textDocuments(trainingTexts(t)...), TrainOptions{VocabSize: 5000,
		Progress: func(p TrainProgress) { cancel() }})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled at the first sign of progress: %v", err)
	}
}

// TestTrainCountsInParts has more words than a worker holds, and some of them in several parts.
func TestTrainCountsInParts(t *testing.T) {
	var text strings.Builder
	for i := range 3 * workerWords {
		fmt.Fprintf(&text, " %d %d", i, i%7)
	}
	text.WriteString(" " + strings.Repeat("x", workerBytes) + " " + strings.Repeat("y", workerBytes))
	words, err := countWords(context.Background(), textDocuments(text.String(), text.String()),
		TrainOptions{Workers: 2}, func(docs, bytes int64) {})
	if err != nil {
		t.Fatal(err)
	}
	if len(words) != 3*workerWords+2 {
		t.Errorf("%d words, want %d", len(words), 3*workerWords+2)
	}
	for _, w := range words {
		want := int64(2)
		if len(w.word) == 2 && w.word < " 7" {
			i := int(w.word[1] - '0')
			want += 2 * int64((3*workerWords-i+6)/7)
		}
		if w.count != want {
			t.Errorf("%.20q is counted %d times, want %d", w.word, w.count, want)
		}
	}
}

func TestTrainRefusesTooManyWords(t *testing.T) {
	c := &wordCounts{count: map[string]int64{"ab": 1}, bytes: maxDistinctBytes - 3}
	if err := c.add(map[string]int32{"ab": 0, "cde": 1}, []int64{5, 7}); err != nil || c.count["ab"] != 6 ||
		c.count["cde"] != 7 {
		t.Errorf("up to the limit: %v, %v", c.count, err)
	}
	if err := c.add(map[string]int32{"f": 0}, []int64{1}); err == nil || !strings.Contains(err.Error(), "MaxBytes") {
		t.Errorf("beyond it: %v", err)
	}
}

func TestTrainProgress(t *testing.T) {
	var last TrainProgress
	texts := trainingTexts(t)
	total := int64(0)
	for _, s := range texts {
		total += int64(len(s))
	}
	_, err := Train(context.Background(), textDocuments(texts...), TrainOptions{VocabSize: 300, Workers: 3,
		Progress: func(p TrainProgress) { last = p }})
	if want := (TrainProgress{int64(len(texts)), total, 44, 44}); err != nil || last != want {
		t.Errorf("last progress is %+v, want %+v (%v)", last, want, err)
	}
}

func BenchmarkTrain(b *testing.B) {
	texts := trainingTexts(b)
	for b.Loop() {
		if _, err := Train(context.Background(), textDocuments(texts...), TrainOptions{VocabSize: 2000}); err != nil {
			b.Fatal(err)
		}
	}
}
