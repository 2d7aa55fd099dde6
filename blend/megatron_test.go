package blend

import (
	"context"
	"crypto/md5"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"mula/blend/fingerprint"
	"mula/fixtures/vectors"
	"mula/index/megatron"
	"mula/index/python"
	"mula/index/rebuild"
	"mula/internal/longtest"
	"mula/shards/audit"
)

// A megatronGolden has the results of testdata/megatron_order.py for a configuration.
type megatronGolden struct {
	MD5       map[string]string   `json:"md5"`
	Samples   int64               `json:"samples"`
	Steps     [][2]string         `json:"steps"` // order and set
	Valid     map[string][]string `json:"valid"` // by dataset
	TrainHash string              `json:"train_hash"`
	ValidHash string              `json:"valid_hash"`
}

func readMegatronGolden(t testing.TB) (batch int, configurations map[string]megatronGolden) {
	t.Helper()
	text, err := os.ReadFile("testdata/megatron_order.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Batch          int
		Configurations map[string]megatronGolden
	}
	if err := json.Unmarshal(text, &golden); err != nil {
		t.Fatal(err)
	}
	return golden.Batch, golden.Configurations
}

// megatronChanges are the configurations of the script, as changes of the first.
var megatronChanges = map[string]func(*megatron.Config){
	"blend":          func(*megatron.Config) {},
	"no extra token": func(c *megatron.Config) { c.ExtraToken = false },
	"partial":        func(c *megatron.Config) { c.KeepPartialValidation, c.Seed = true, 7 },
	"one file":       func(c *megatron.Config) { c.Blend = megatron.Blend{Prefixes: []string{"f0"}} },
	"twice": func(c *megatron.Config) {
		c.Blend = megatron.Blend{Prefixes: []string{"f0", "f2", "f0"}, Weights: []float64{0.1, 0.7, 0.2}}
	},
}

// megatronCache writes the script's files and the cache of one of its configurations, in the
// directory cache, and compares the cache with Megatron's files.
func megatronCache(t testing.TB, name string) (c corpus, golden megatronGolden, batch int) {
	t.Helper()
	c = newCorpus(t)
	for f, documents := range vectors.Documents {
		lengths, tokens := vectors.Lengths(f, documents), 0
		for _, length := range lengths {
			tokens += int(length)
		}
		var bin []byte
		for i := range tokens {
			bin = binary.LittleEndian.AppendUint16(bin, uint16((7919*i+10007*f+i*i/3)%50000))
		}
		prefix := filepath.Join(c.dir, fmt.Sprint("f", f))
		if err := errors.Join(os.WriteFile(prefix+".idx", vectors.Index(lengths), 0o644),
			os.WriteFile(prefix+".bin", bin, 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	config := megatron.NewConfig()
	config.Blend = megatron.Blend{Prefixes: []string{"f0", "f1", "f2"}, Weights: []float64{0.5, 0.2, 0.3}}
	config.Split, config.SequenceLength, config.Seed = "70,20,10", 64, 1234
	config.Samples = [3]megatron.Size{megatron.SizeOf(300), megatron.SizeOf(40), megatron.SizeOf(10)}
	config.Tokenizer = python.Object{{Key: "class", Value: python.String("_NullTokenizer")},
		{Key: "tokenizer_path", Value: python.List{python.Null{}}}, {Key: "vocab_size", Value: python.String("50304")}}
	config.Root, config.Cache = c.dir, filepath.Join(c.dir, "cache")
	megatronChanges[name](&config)
	x, err := megatron.New(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	if _, err := x.Build(t.Context(), rebuild.BuildOptions{Threads: 1}); err != nil {
		t.Fatal(err)
	}
	batch, configurations := readMegatronGolden(t)
	golden = configurations[name]
	sums := map[string]string{}
	for file := range golden.MD5 {
		data, err := os.ReadFile(filepath.Join(config.Cache, file))
		if err != nil {
			t.Fatal(err)
		}
		sum := md5.Sum(data)
		sums[file] = hex.EncodeToString(sum[:])
	}
	if diff := cmp.Diff(golden.MD5, sums); diff != "" {
		t.Fatalf("the cache is not that of Megatron (-want +got)\n%s", diff)
	}
	return c, golden, batch
}

func (g megatronGolden) config() string {
	return fmt.Sprintf("order: megatron\nmegatron: {cache: cache, name: %s, validation: %s}\n", g.TrainHash,
		g.ValidHash)
}

// A plan over a cache gives, sample for sample, what Megatron trains on and evaluates on.
func TestMegatronGolden(t *testing.T) {
	for name := range megatronChanges {
		t.Run(name, func(t *testing.T) {
			c, golden, batch := megatronCache(t, name)
			d := c.open(golden.config())
			if d.Length() != golden.Samples || len(golden.Steps) < 30 {
				t.Fatalf("%d samples, %d steps, want %d samples", d.Length(), len(golden.Steps), golden.Samples)
			}
			if want := map[bool]int{true: 63, false: 64}[name == "no extra token"]; d.SequenceLength != want {
				t.Errorf("sequence length %d, want %d", d.SequenceLength, want)
			}
			steps := stepsOf(t, d, int64(batch))
			if len(steps) != len(golden.Steps) {
				t.Fatalf("%d steps, want %d", len(steps), len(golden.Steps))
			}
			for n, s := range steps {
				if order := hex.EncodeToString(s.Order[:]); order != golden.Steps[n][0] ||
					hex.EncodeToString(s.Set[:]) != golden.Steps[n][1] {
					t.Fatalf("step %d has the hashes %s and %x, Megatron's has %v", n, order, s.Set, golden.Steps[n])
				}
			}
			tokens := make([]uint32, d.SequenceLength+1)
			for i, s := range d.Sources {
				var got []string
				for sample := range d.Validation(i) {
					if err := d.Tokens(tokens, sample); err != nil {
						t.Fatal(err)
					}
					h := fingerprint.SampleHash(tokens)
					got = append(got, hex.EncodeToString(h[:]))
				}
				want := golden.Valid[fmt.Sprint(i)]
				if !slices.Equal(got, want) || int64(len(want)) != s.Validation {
					t.Errorf("source %q: %d validation samples %.2s…, want %d %.2s…", s.Name, s.Validation, got,
						len(want), want)
				}
			}
		})
	}
}

// Everything else that reads along a plan agrees with itself: peek with the tokens, where with
// peek, document starts with both, blocks with single positions.
func TestMegatronPlan(t *testing.T) {
	longtest.SkipIfShort(t)
	c, golden, _ := megatronCache(t, "partial")
	d := c.open(golden.config() + "skips: [{from: 10, to: 13}]\n")
	again, err := ReadPlan(filepath.Join(c.dir, "plan.json"))
	if err != nil || again.Fingerprint() != d.Fingerprint() {
		t.Fatalf("another plan when it is read again: %v", err)
	}
	if _, err := again.Locate(0); err == nil || !strings.Contains(err.Error(), "open the plan") {
		t.Errorf("a position of a plan that is not open: %v", err)
	}
	for range again.Validation(0) {
		t.Error("a validation sample of a plan that is not open")
	}
	type place struct {
		position int64
		from, to int
	}
	var want = map[[2]int64][]place{} // by source and document
	starts := map[int64][]int32{}     // by position
	tokens, one := make([]uint32, d.SequenceLength+1), make([]uint32, 1)
	for position := range d.Length() {
		s, parts, err := d.Peek(t.Context(), position)
		if err != nil {
			t.Fatal(err)
		}
		if err := d.Tokens(tokens, s); err != nil {
			t.Fatal(err)
		}
		shard, at := shardOf(t, d, s.Source, 0), 0
		for i, p := range parts {
			if p.From != at || p.To <= p.From {
				t.Fatalf("position %d: a part [%d, %d) after token %d", position, p.From, p.To, at)
			}
			at = p.To
			// A part after the first starts its document; a part before the last ends its document.
			offset := int64(0)
			if i == 0 {
				offset = s.Token - p.First
			}
			if offset == 0 {
				starts[position] = append(starts[position], int32(p.From))
			}
			if i+1 < len(parts) && offset+int64(p.To-p.From) != p.Tokens {
				t.Fatalf("position %d: part %d of %d ends in the middle of its document", position, i, len(parts))
			}
			for k := p.From; k < p.To; k += 7 {
				if err := shard.Read(one, p.First+offset+int64(k-p.From)); err != nil || one[0] != tokens[k] {
					t.Fatalf("position %d: token %d is %d, in its document %d, %v", position, k, tokens[k], one[0], err)
				}
			}
			key := [2]int64{int64(s.Source), p.Number}
			want[key] = append(want[key], place{position, p.From, p.To})
		}
		if at != d.SequenceLength+1 {
			t.Fatalf("position %d: the parts end at token %d", position, at)
		}
		if s.Epoch != -1 || s.Skipped != (position >= 10 && position < 13) {
			t.Errorf("position %d: %+v", position, s)
		}
		if back, ok := d.Position(s.Source, s.Epoch, s.Window); !ok || back != position {
			t.Errorf("position %d: back at %d, %v", position, back, ok)
		}
	}
	uses := map[Use]int{}
	for i, s := range d.Sources {
		for number := range s.Shards[0].Documents {
			span, err := shardOf(t, d, i, 0).Span(number)
			if err != nil {
				t.Fatal(err)
			}
			var got []place
			for o, err := range d.order.occurrences(t.Context(), Document{Source: i, Number: number, First: span.First,
				Tokens: span.End - span.First}) {
				if err != nil {
					t.Fatal(err)
				}
				uses[o.Use]++
				if o.Use == Drawn || o.Use == SkippedOver {
					got = append(got, place{o.Sample.Position, o.From, o.To})
					if located, err := d.Locate(o.Sample.Position); err != nil || located != o.Sample {
						t.Fatalf("%+v, but there is %+v", o.Sample, located)
					}
				}
			}
			less := func(a, b place) int { return int(a.position-b.position)*1000 + a.from - b.from }
			slices.SortFunc(got, less)
			if !slices.Equal(got, want[[2]int64{int64(i), number}]) {
				t.Fatalf("document %d of source %q: where gives %v, peek %v", number, s.Name, got,
					want[[2]int64{int64(i), number}])
			}
		}
	}
	for _, use := range []Use{Drawn, SkippedOver, HeldOut, NoWindow} {
		if uses[use] == 0 {
			t.Errorf("no document is %v", use)
		}
	}
	at := int64(0)
	for b, err := range d.Positions(t.Context(), 0, d.Length()) {
		if err != nil {
			t.Fatal(err)
		}
		for i := range b.Sources {
			if s, err := d.Locate(at); err != nil || s.Source != int(b.Sources[i]) || s.Window != b.Windows[i] {
				t.Fatalf("position %d: window %d of source %d, want %+v, %v", at, b.Windows[i], b.Sources[i], s, err)
			}
			at++
		}
	}
	if at != d.Length() {
		t.Errorf("%d positions in blocks", at)
	}
	for position := range d.Length() {
		s, err := d.Locate(position)
		if err != nil {
			t.Fatal(err)
		}
		if s.Skipped {
			continue
		}
		if got, _, err := d.DocumentStarts(nil, s); err != nil || !slices.Equal(got, starts[position]) {
			t.Errorf("position %d: documents start at %v, want %v, %v", position, got, starts[position], err)
		}
	}

	summary := d.Summary()
	if len(summary.Stages) != 1 || summary.Length != 300 || summary.Skipped != 3 || summary.Sources[0].Samples != 150 ||
		summary.Sources[0].Stages[0].Share != 0.5 {
		t.Errorf("summary %+v", summary)
	}
	report, err := d.Check(t.Context(), CheckOptions{})
	if err != nil || report.Failed() {
		t.Errorf("check: %+v, %v", report, err)
	}
}

// A cache or a shard that differs from the built plan is noticed.
func TestMegatronChanges(t *testing.T) {
	c, golden, _ := megatronCache(t, "blend")
	p := c.seal(golden.config())
	if n := len(p.order.files()); n != 2*(3+3*3) {
		t.Errorf("the plan has %d files of the cache: %v", n, p.order.files())
	}
	blendIndex := filepath.Join(c.dir, "cache", golden.TrainHash+"-BlendedDataset-train-dataset_sample_index.npy")
	for what, v := range map[string]struct {
		change  func(path string) error
		path    string
		message string
	}{
		"a sample index cut": {func(path string) error { return os.Truncate(path, 500) }, blendIndex,
			"is truncated"},
		"no file": {os.Remove, blendIndex, "no such file"},
		"another order at a check value": {func(path string) error { flip(t, path, 128+8); return nil }, blendIndex,
			"position 1 has"},
		"a longer file": {func(path string) error { return os.Truncate(path, 128+8*300+1) },
			blendIndex, "bytes, previously"},
		"tokens": {func(path string) error {
			for at := range 200 {
				flip(t, path, at*10)
			}
			return nil
		}, filepath.Join(c.dir, "f0.bin"), "has hash"},
	} {
		t.Run(what, func(t *testing.T) {
			saved, err := os.ReadFile(v.path)
			if err != nil {
				t.Fatal(err)
			}
			defer os.WriteFile(v.path, saved, 0o644)
			if err := v.change(v.path); err != nil {
				t.Fatal(err)
			}
			if d, err := Open(t.Context(), p, OpenOptions{}); err == nil {
				d.Close()
				t.Error("was opened")
			} else if !strings.Contains(err.Error(), v.message) {
				t.Errorf("the error does not say %q: %v", v.message, err)
			}
		})
	}
	// Only check finds a change that no check value covers.
	d, err := Open(t.Context(), p, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	flip(t, blendIndex, 128+8*290)
	report, err := d.Check(t.Context(), CheckOptions{})
	if err != nil || len(report.Findings) == 0 ||
		!slices.ContainsFunc(report.Findings, func(f audit.Finding) bool {
			return f.Level == audit.Error &&
				f.Path == blendIndex
		}) {
		t.Errorf("%+v, %v", report.Findings, err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Seal(ctx, mustConfig(t, c, golden.config()), SealOptions{}); !errors.Is(err, context.Canceled) {
		t.Errorf("after cancellation: %v", err)
	}
}

// A cache that is damaged before it is sealed makes no plan: the error names file and row.
func TestMegatronDamaged(t *testing.T) {
	c, golden, _ := megatronCache(t, "blend")
	cache := filepath.Join(c.dir, "cache")
	file := func(pattern string) string {
		found, err := filepath.Glob(filepath.Join(cache, pattern))
		if err != nil || len(found) == 0 {
			t.Fatal(pattern, err)
		}
		return found[0]
	}
	for _, v := range []struct {
		file string
		at   int // of the byte, from the beginning of the file
		with byte
		want string
	}{
		{file("*-GPTDataset-train-sample_index.npy"), 128 + 8*40, 0x40, "row "},     // a position
		{file("*-GPTDataset-train-sample_index.npy"), 128 + 8*40 + 4, 0x40, "row "}, // an offset
		{file("*-GPTDataset-valid-sample_index.npy"), 128 + 8*2 + 4, 0x01, "row "},
		{file("*-GPTDataset-train-document_index.npy"), 128 + 4*40 + 1, 0x40, "entry 40 is document "},
		{file("*-GPTDataset-train-shuffle_index.npy"), 128 + 4*40 + 1, 0x40, "entry 40 is sample "},
		{file("*-GPTDataset-train-shuffle_index.npy"), 128 + 4*40, 0x01, "are not a permutation"},
		{filepath.Join(cache, golden.TrainHash+"-BlendedDataset-train-dataset_index.npy"), 128 + 2*40, 0x40,
			"entry 40 is dataset "},
		{filepath.Join(cache, golden.TrainHash+"-BlendedDataset-train-dataset_sample_index.npy"), 128 + 8*40, 0x01,
			"entry 40 is sample "},
		{filepath.Join(cache, golden.ValidHash+"-BlendedDataset-valid-dataset_sample_index.npy"), 128 + 8*3, 0x01,
			"validation: "},
	} {
		whole, err := os.ReadFile(v.file)
		if err != nil {
			t.Fatal(err)
		}
		damaged := slices.Clone(whole)
		damaged[v.at] ^= v.with
		if err := os.WriteFile(v.file, damaged, 0o644); err != nil {
			t.Fatal(err)
		}
		_, err = Seal(t.Context(), mustConfig(t, c, golden.config()), SealOptions{})
		if !errors.Is(err, megatron.ErrCorrupt) || !strings.Contains(err.Error(), v.want) {
			t.Errorf("byte %d of %s: %v; want %q", v.at, filepath.Base(v.file), err, v.want)
		}
		if err := os.WriteFile(v.file, whole, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	c.seal(golden.config())
}

func mustConfig(t testing.TB, c corpus, text string) *Config {
	t.Helper()
	config, err := ParseConfig([]byte(text), "blend.yaml", c.dir)
	if err != nil {
		t.Fatal(err)
	}
	return config
}

// Plan, cache and shards can be moved together, and the plan says the same wherever it lies.
func TestMegatronMoves(t *testing.T) {
	c, golden, _ := megatronCache(t, "twice")
	p := c.seal(golden.config())
	if p.Sources[0].Name != "f0" || p.Sources[2].Name != "f0 (2)" {
		t.Errorf("sources %q and %q", p.Sources[0].Name, p.Sources[2].Name)
	}
	moved := filepath.Join(t.TempDir(), "elsewhere")
	if err := os.Rename(c.dir, moved); err != nil {
		t.Fatal(err)
	}
	defer os.Rename(moved, c.dir)
	again, err := ReadPlan(filepath.Join(moved, "plan.json"))
	if err != nil {
		t.Fatal(err)
	}
	d, err := Open(t.Context(), again, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	d.Close()
	if d, err = Open(t.Context(), p, OpenOptions{Base: moved}); err != nil { // p was made where the shards were
		if !strings.Contains(err.Error(), c.dir) {
			t.Error(err)
		}
	} else {
		d.Close()
	}
	if again.Fingerprint() != p.Fingerprint() {
		t.Error("another plan")
	}
}

// The files of a cache may be links to files elsewhere.
func TestMegatronLinks(t *testing.T) {
	c, golden, _ := megatronCache(t, "twice")
	want := c.seal(golden.config()).Fingerprint()
	cache, elsewhere := filepath.Join(c.dir, "cache"), t.TempDir()
	for name := range golden.MD5 {
		if err := errors.Join(os.Rename(filepath.Join(cache, name), filepath.Join(elsewhere, name)),
			os.Symlink(filepath.Join(elsewhere, name), filepath.Join(cache, name))); err != nil {
			t.Fatal(err)
		}
	}
	p := c.seal(golden.config())
	if p.Fingerprint() != want {
		t.Error("another plan")
	}
	d, err := Open(t.Context(), p, OpenOptions{})
	if err != nil {
		t.Fatal(err)
	}
	d.Close()
}

// What the configuration can say, and what it cannot.
func TestMegatronConfig(t *testing.T) {
	c, golden, _ := megatronCache(t, "blend")
	description := golden.TrainHash + "-BlendedDataset-train-description.txt"
	same := c.seal("order: megatron\nmegatron: {cache: cache}\n").Fingerprint()
	for _, text := range []string{
		"order: megatron\nsequence_length: 64\nmegatron: {cache: cache/, split: train, root: .}\n",
		"order: megatron\nmegatron: {cache: " + filepath.Join(c.dir, "cache") + ", name: " + golden.TrainHash + "}\n",
		"order: megatron\nmegatron: {cache: cache, name: cache/" + description + "}\n",
	} {
		if p := c.seal(text); p.Fingerprint() != same {
			t.Errorf("%s: another plan", text)
		}
	}
	p := c.seal("order: megatron\nmegatron: {cache: cache, split: valid}\n")
	if p.order.(*megatronOrder).cache.Name != golden.ValidHash {
		t.Errorf("the only valid blend is %s, not %s", golden.ValidHash, p.order.(*megatronOrder).cache.Name)
	}
	head := "order: megatron\nmegatron: {cache: cache}\n"
	for text, want := range map[string]string{
		"order: megatrn\n": `blend.yaml:1: order "megatrn" is not known; did you mean "megatron"?`,
		"sequence_length: 4\nmegatron: {cache: cache}\nsources: [{name: a, shards: [f0]}]\n": `blend.yaml:2: megatron requires "order: megatron"`,
		"order: megatron\n":                           "needs the directory of the index files",
		head + "seed: 5\n":                            "blend.yaml:3: seed cannot be set with",
		head + "sources: [{name: a, shards: [f0]}]\n": "blend.yaml:3: sources cannot be set with",
		head + "sources: []\n":                        "blend.yaml:3: sources cannot be set with",
		head + "stages: []\n":                         "blend.yaml:3: stages cannot be set with",
		head + "seed: 0\n":                            "blend.yaml:3: seed cannot be set with",
		head + "stages: [{samples: 5}]\n":             "stages cannot be set with",
		head + "samples: 5\n":                         "samples cannot be set with",
		head + "validation: 0.1\n":                    "validation cannot be set with",
		head + "sequence_length: 63\n": "blend.yaml:3: sequence_length is 63, but " +
			"the samples of the cache train on 64 tokens",
		head + "skips: [{from: 0, to: 301}]\n":                         "beyond the plan's 300 positions",
		"order: megatron\nmegatron: {cache: nowhere}\n":                "no such file",
		"order: megatron\nmegatron: {cache: .}\n":                      "describes neither a blend nor a dataset",
		"order: megatron\nmegatron: {cache: cache, name: \"0123\"}\n":  "is not a name in an index cache",
		"order: megatron\nmegatron: {cache: cache, name: 0123}\n":      `megatron.name is 0123: it is not a text in YAML; write "0123" in quotation marks`,
		head + "tokens: 5k\n":                                          "blend.yaml:3: tokens cannot be set with",
		"order: megatron\nmegatron: {cache: cache, root: elsewhere}\n": "elsewhere",
		"order: megatron\nmegatron: {cache: cache, split: valid, name: " + golden.TrainHash +
			"}\n": "belongs to the split train, not valid",
		"order: megatron\nmegatron: {cache: cache, validation: \"" + strings.Repeat("0", 32) +
			"\"}\n": "no description of",
	} {
		config, err := ParseConfig([]byte(text), "blend.yaml", c.dir)
		if err == nil {
			_, err = Seal(t.Context(), config, SealOptions{})
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: the error does not say %q: %v", text, want, err)
		}
	}
	// Two blends of a split must be told apart.
	other := filepath.Join(c.dir, "cache", strings.Repeat("1", 32)+"-BlendedDataset-train-description.txt")
	if err := copyFile(filepath.Join(c.dir, "cache", description), other); err != nil {
		t.Fatal(err)
	}
	if _, err := Seal(t.Context(), mustConfig(t, c, head), SealOptions{}); err == nil ||
		!strings.Contains(err.Error(), "2 blends of the split train") {
		t.Errorf("two blends: %v", err)
	}
}
