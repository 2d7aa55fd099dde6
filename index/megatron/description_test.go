package megatron

import (
	"context"
	"strings"
	"testing"

	"mula/index/python"
	"mula/index/rebuild"
)

func TestLikeDescription(t *testing.T) {
	c := vectorConfig(t, vectorFiles(t))
	x, err := New(context.Background(), c)
	if err != nil {
		t.Fatal(err)
	}
	defer x.Close()
	entries, err := x.Describe(context.Background(), false)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		l, err := likeDescription([]byte(e.Text))
		if err != nil {
			t.Fatal(err)
		}
		if python.Dumps(l.Tokenizer) != python.Dumps(c.Tokenizer) || l.SequenceLength != 64 || l.Seed != 1234 ||
			l.Split != "70,20,10" ||
			l.Class != e.Class || l.Samples.count() != e.Samples || l.Of != e.Splits[0] ||
			strings.Join(l.Prefixes, " ") != strings.Join(e.Prefixes, " ") {
			t.Errorf("%+v of %s", l, e.Text)
		}
		if n := len(l.Profiles); n == 0 || l.Profiles[n-1].Name() != "core-0.13" {
			t.Errorf("profiles %v", l.Profiles)
		}
	}
}

func TestLikeDescriptionErrors(t *testing.T) {
	for text, want := range map[string]string{
		"":                                    "not a Megatron description",
		"[]":                                  "want an object",
		`{"class": "GPTDataset"}`:             "not formatted",
		"{\n    \"class\": \"Nothing\"\n}":    `class "Nothing"`,
		"{\n    \"class\": \"GPTDataset\"\n}": "keys",
		"{\n    \"class\": \"BlendedDataset\"\n}": "keys",
	} {
		if _, err := likeDescription([]byte(text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v; want %q", text, err, want)
		}
	}
	c := vectorConfig(t, vectorFiles(t))
	text := top(t, c, rebuild.Train).Text
	for _, change := range []struct{ old, new, want string }{
		{`"size": 300`, `"size": -300`, "size"},
		{`"size": 300`, `"size": null`, "weights"},
		{`"size": 300`, `"size": 300.0`, "size"},
		{`"random_seed": 1234`, `"random_seed": 4294967296`, "random_seed"},
		{`"sequence_length": 64`, `"sequence_length": 0`, "sequence_length"},
		{`"num_samples": 151`, `"num_samples": "151"`, "num_samples"},
		{`"index_split": "train"`, `"index_split": "all"`, "index_split"},
		{`"dataset_path": "f0"`, `"dataset_path": ""`, "dataset_path"},
		{`"split": "70,20,10"`, `"split": null`, "split_matrix"},
		{`"split": "70,20,10"`, `"split": ""`, "split"},
		{"            0,\n                    0.7", "            0.9,\n                    0.7", "split_matrix"},
		{"0.5,\n        0.2", "0.5,\n        2", "weights"},
		{"0.5,\n        0.2", "0.5,\n        [],\n        0.2", "weights"},
		{`"split": "train"`, `"split": "test"`, "split"},
		{`"GPTDataset"`, `"MockGPTDataset"`, "MockGPTDataset"},
	} {
		changed := strings.Replace(text, change.old, change.new, 1)
		if changed == text {
			t.Errorf("%q is not in the description", change.old)
			continue
		}
		if _, err := likeDescription([]byte(changed)); err == nil || !strings.Contains(err.Error(), change.want) {
			t.Errorf("%q instead of %q: %v; want %q", change.new, change.old, err, change.want)
		}
	}
}

// An accepted description is hashed unchanged, and describes a possible training.
func FuzzLikeDescription(f *testing.F) {
	c := vectorConfig(f, vectorFiles(f))
	for _, name := range []string{"core-0.4", "core-0.5", "core-0.9", "core-0.13"} {
		c.Profile, c.Tokenizer = profileNamed(f, name), nullTokenizer()
		if name == "core-0.4" {
			c.Tokenizer = nil
		}
		x, err := New(context.Background(), c)
		if err != nil {
			f.Fatal(err)
		}
		entries, err := x.Describe(context.Background(), false)
		if err != nil {
			f.Fatal(err)
		}
		f.Add([]byte(entries[0].Text))
		f.Add([]byte(entries[len(entries)-1].Text))
		x.Close()
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		l, err := likeDescription(text)
		if err != nil {
			return
		}
		d, err := parseDescription(text)
		if err != nil || d.text != string(text) {
			t.Fatalf("%q is kept as %q, %v", text, d.text, err)
		}
		if l.SequenceLength < 1 || len(l.Prefixes) == 0 {
			t.Fatalf("%+v", l)
		}
		gpt := d
		if len(d.members) > 0 {
			gpt = d.members[0]
		}
		if first, end, err := gpt.documents(1000); err == nil && (first > end || first < -1000) {
			t.Fatalf("documents %d to %d", first, end)
		}
	})
}
