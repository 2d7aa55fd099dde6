package fingerprint

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"math/big"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// From python3: import hashlib; hashlib.sha256(b"".join(i.to_bytes(4, "little") for i in [1, 2,
// 65535, 4294967295])).hexdigest()[:32]
func TestSampleHash(t *testing.T) {
	if h := SampleHash([]uint32{1, 2, 65535,
		4294967295}); hex.EncodeToString(h[:]) != "20f1aee505a5bd9eacd1ad1a0cc49338" {
		t.Errorf("%x", h)
	}
	if h := SampleHash(nil); hex.EncodeToString(h[:]) != "e3b0c44298fc1c149afbf4c8996fb924" { // the SHA-256 of nothing
		t.Errorf("%x", h)
	}
}

// The set hash is a sum modulo 2^128 of little-endian numbers, by big integers.
func TestSetHash(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var got SetHash
		sum := new(big.Int)
		for _, b := range rapid.SliceOfN(rapid.SliceOfN(rapid.Byte(), 16, 16), 0, 20).Draw(t, "hashes") {
			got.Add([16]byte(b))
			slices.Reverse(b)
			sum.Add(sum, new(big.Int).SetBytes(b))
		}
		want := sum.Mod(sum, new(big.Int).Lsh(big.NewInt(1), 128)).FillBytes(make([]byte, 16))
		slices.Reverse(want)
		if !bytes.Equal(got[:], want) {
			t.Fatalf("%x, want %x", got, want)
		}
	})
}

// A rank that continues with the state of another gets the hashes of a single rank.
func TestHasherState(t *testing.T) {
	var whole, part Hasher
	for n := range uint32(40) {
		whole.Add([]uint32{n})
		state, err := part.AppendBinary([]byte("before"))
		if err != nil {
			t.Fatal(err)
		}
		part = Hasher{}
		if err := part.UnmarshalBinary(state[len("before"):]); err != nil || len(state) != len("before")+HasherBytes {
			t.Fatalf("%d bytes, %v", len(state), err)
		}
		part.Add([]uint32{n})
	}
	if got, want := part.Step(3, 5), whole.Step(3, 5); *got.Order != *want.Order || got.Set != want.Set ||
		got.Samples != want.Samples {
		t.Errorf("%+v, want %+v", got, want)
	}
	if err := part.UnmarshalBinary(make([]byte, HasherBytes-1)); err == nil {
		t.Error("a state that is too short was read")
	}
}

// A testRun is a run of 600 samples of 17 tokens. The tokens are a function of the plan's name and
// of the position.
type testRun struct{ plan string }

// A part is steps [from, to) of a run, as rank of world hashes them. to 0 is the end of the run;
// world 0 is one rank.
type part struct {
	batch, rank, world int
	from, to           int64
}

const testPositions = 600

func (r testRun) hash(p part, yield func(StepHash) error) error {
	batch, world := int64(p.batch), int64(max(1, p.world))
	if p.to == 0 {
		p.to = testPositions / batch
	}
	var h Hasher
	for step := p.from; step < p.to; step++ {
		first := step*batch + int64(p.rank)*batch/world
		for position := first; position < first+batch/world; position++ {
			tokens := make([]uint32, 17)
			for i := range tokens {
				tokens[i] = uint32(position)*17 + uint32(i)*uint32(len(r.plan))
			}
			h.Add(tokens)
		}
		if err := yield(h.Step(step, step*batch)); err != nil {
			return err
		}
	}
	return nil
}

func logOf(t testing.TB, r testRun, p part) string {
	t.Helper()
	var b bytes.Buffer
	header := Header{Plan: r.plan, SequenceLength: 16, BatchSize: p.batch}
	if p.world > 1 {
		header.Rank, header.World = p.rank, p.world
	}
	w, err := NewWriter(&b, header)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.hash(p, w.Write); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func reader(t testing.TB, log, name string) *Reader {
	t.Helper()
	r, err := NewReader(strings.NewReader(log), name)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func compareLogs(t testing.TB, a, b string) (Comparison, error) {
	t.Helper()
	x, y := reader(t, a, "a.jsonl"), reader(t, b, "b.jsonl")
	return Compare(x, y, x.Header, y.Header)
}

// The set hashes of the ranks of a run add up to the set hashes of the steps.
func TestRanksAddUp(t *testing.T) {
	r := testRun{"plan"}
	whole := logOf(t, r, part{batch: 12})
	for _, world := range []int{1, 2, 3, 4} {
		var ranks []*Reader
		for rank := range world {
			ranks = append(ranks, reader(t, logOf(t, r, part{batch: 12, rank: rank, world: world}),
				fmt.Sprint("rank", rank)))
		}
		slices.Reverse(ranks)
		sum, header, err := Combine(ranks)
		if err != nil {
			t.Fatal(err)
		}
		r := reader(t, whole, "whole")
		got, err := Compare(sum, r, header, r.Header)
		if err != nil || got.Kind != NoDifference || got.Equal != 50 || !got.SamePlan || got.Ordered != (world == 1) {
			t.Errorf("%d ranks: %+v, %v", world, got, err)
		}
	}
	log := func(rank int) *Reader {
		return reader(t, logOf(t, r, part{batch: 12, rank: rank, world: 3}), fmt.Sprint("rank", rank))
	}
	cut := func(rank int) *Reader {
		text := logOf(t, r, part{batch: 12, rank: rank, world: 3, to: 20})
		return reader(t, text, "short")
	}
	for name, ranks := range map[string][]*Reader{
		"none": {}, "two": {log(0), log(1)}, "twice": {log(0), log(1), log(1)}, "other": {log(0), log(1),
			reader(t, whole, "whole")},
	} {
		if _, _, err := Combine(ranks); err == nil {
			t.Errorf("%s: no error", name)
		}
	}
	for i := range 3 {
		ranks := []*Reader{log(0), log(1), log(2)}
		ranks[i] = cut(i)
		sum, _, err := Combine(ranks)
		for err == nil {
			_, err = sum.Next()
		}
		if errors.Is(err, io.EOF) || !strings.Contains(err.Error(), "end at different steps") {
			t.Errorf("rank %d is cut short: %v", i, err)
		}
	}
}

func TestCompare(t *testing.T) {
	r := testRun{"plan"}
	log := logOf(t, r, part{batch: 10})
	lines := strings.SplitAfter(log, "\n")
	edit := func(step int, old, new string) string {
		edited := slices.Clone(lines)
		if edited[step+1] = strings.Replace(lines[step+1], old, new, 1); edited[step+1] == lines[step+1] {
			t.Fatalf("step %d has no %s", step, old)
		}
		return strings.Join(edited, "")
	}
	set := func(step int) string { return lines[step+1][strings.Index(lines[step+1], `"set":"`)+7:][:32] }
	order := func(step int) string { return lines[step+1][strings.Index(lines[step+1], `"order":"`)+9:][:64] }
	for name, v := range map[string]struct {
		other string
		kind  Kind
		step  int64
		equal int64
		first int64
	}{
		"same":      {log, NoDifference, 0, 60, 0},
		"set":       {edit(17, set(17), set(18)), SetDiffers, 17, 17, 0},
		"order":     {edit(23, order(23), order(24)), OrderDiffers, 23, 23, 0},
		"samples":   {edit(30, `"samples":10`, `"samples":9`), SamplesDiffer, 30, 30, 0},
		"position":  {edit(30, `"first":300`, `"first":301`), PositionDiffers, 30, 30, 0},
		"missing":   {strings.Join(slices.Delete(slices.Clone(lines), 6, 7), ""), StepMissing, 5, 5, 0},
		"shorter":   {strings.Join(lines[:41], ""), NoDifference, 0, 40, 0},
		"later":     {lines[0] + strings.Join(lines[21:], ""), NoDifference, 0, 40, 20},
		"middle":    {lines[0] + strings.Join(lines[21:31], ""), NoDifference, 0, 10, 20},
		"no order":  {edit(5, `"order":"`+order(5)+`",`, ""), NoDifference, 0, 60, 0},
		"more keys": {edit(5, `"samples"`, `"host":"x","samples"`), NoDifference, 0, 60, 0},
	} {
		for _, swap := range []bool{false, true} {
			a, b := log, v.other
			if swap {
				a, b = b, a
			}
			got, err := compareLogs(t, a, b)
			if err != nil || got.Kind != v.kind || got.Step != v.step || got.Equal != v.equal || got.First != v.first ||
				!got.SamePlan || got.Ordered != (name != "no order") {
				t.Errorf("%s, %v: %+v, %v", name, swap, got, err)
			}
		}
	}
	other := testRun{"another plan"}
	got, err := compareLogs(t, log, logOf(t, other, part{batch: 10}))
	if err != nil || got.SamePlan || got.Kind != SetDiffers || got.Step != 0 {
		t.Errorf("another plan: %+v, %v", got, err)
	}
	for name, v := range map[string]struct{ a, b, want string }{
		"batch": {log, strings.Replace(log, `"batch_size":10`, `"batch_size":12`, 1), "10 samples in one log and 12 in the other"},
		"length": {log, strings.Replace(log, `"sequence_length":16`, `"sequence_length":17`, 1),
			"17 tokens in one log and 18 in the other"},
		"rank": {log, strings.Replace(log, `"batch_size":10`, `"batch_size":10,"rank":1,"world":2`, 1),
			"rank 0 of 1, the other from rank 1 of 2"},
		"disjoint":  {strings.Join(lines[:21], ""), lines[0] + strings.Join(lines[21:], ""), "no step in common"},
		"empty":     {log, lines[0], "no step in common"},
		"truncated": {log, log[:len(log)-5], "b.jsonl:61: the line is incomplete"},
		"late":      {log, log[:len(log)-5] + "\n", "b.jsonl:61: "},
	} {
		if _, err := compareLogs(t, v.a, v.b); err == nil || !strings.Contains(err.Error(), v.want) {
			t.Errorf("%s: %v, want %q", name, err, v.want)
		}
	}
}

// Every line that is not whole or not a log's is named.
func TestLogErrors(t *testing.T) {
	const header = `{"plan":"p","sequence_length":4,"batch_size":2}` + "\n"
	line := func(step int) string {
		return fmt.Sprintf(`{"step":%d,"first":0,"samples":1,"order":"%s","set":"%s"}`+"\n", step,
			strings.Repeat("0", 64), strings.Repeat("0", 32))
	}
	for name, v := range map[string]struct{ text, want string }{
		"empty":         {"", "log: the file is empty"},
		"no line end":   {strings.TrimSuffix(header, "\n"), "log:1: the line is incomplete"},
		"other file":    {"{}\n", "log:1: not the first line"},
		"not json":      {"step 1\n", "log:1: not the first line"},
		"rank":          {`{"plan":"p","sequence_length":4,"batch_size":2,"rank":3,"world":2}` + "\n", "log:1: "},
		"second header": {header + line(0) + header, "log:3: not a line"},
		"back":          {header + line(1) + line(1), "log:3: step 1 comes after step 1"},
		"samples":       {header + strings.Replace(line(1), `"samples":1`, `"samples":3`, 1), "log:2: 3 samples"},
		"negative":      {header + strings.Replace(line(1), `"first":0`, `"first":-1`, 1), "log:2: "},
		"digits":        {header + strings.Replace(line(1), "000", "00", 1), "log:2: "},
		"not hex":       {header + strings.Replace(line(1), "000", "0x0", 1), "log:2: "},
		"cut":           {header + line(0) + line(1)[:30], "log:3: the line is incomplete"},
		"long":          {header + line(0) + strings.Repeat(" ", maxLogLine+5000), "log:3: the line has more than"},
		"blank":         {header + "\n" + line(0), "log:2: not a line"},
		"no set": {header + `{"step":0,"first":0,"samples":1}` + "\n",
			"log:2: not a line of a fingerprint log, which has"},
		"two in a line":  {header + strings.TrimSuffix(line(0), "\n") + line(1), "log:2: "},
		"negative steps": {header + line(-1), "log:2: step -1"},
	} {
		r, err := NewReader(strings.NewReader(v.text), "log")
		for err == nil {
			_, err = r.Next()
		}
		if !strings.HasPrefix(err.Error(), v.want) {
			t.Errorf("%s: %v, want %q", name, err, v.want)
		}
	}
	w, err := NewWriter(io.Discard, Header{})
	if err != nil {
		t.Fatal(err)
	}
	var h Hasher
	if err := w.Write(h.Step(3, 0)); err != nil {
		t.Error(err)
	}
	if err := w.Write(h.Step(3, 0)); err == nil {
		t.Error("a step was written twice")
	}
}

func FuzzLogReader(f *testing.F) {
	r := testRun{"plan"}
	f.Add([]byte(logOf(f, r, part{batch: 4})))
	f.Add([]byte(logOf(f, r, part{batch: 4, rank: 1, world: 2})))
	f.Fuzz(func(t *testing.T, data []byte) {
		r, err := NewReader(bytes.NewReader(data), "log")
		last := int64(-1)
		for err == nil {
			var s StepHash
			if s, err = r.Next(); err == nil && (s.Step <= last || s.Samples > int64(r.Header.BatchSize)) {
				t.Fatalf("%+v after step %d", s, last)
			}
			last = s.Step
		}
		if err == nil || !errors.Is(err, io.EOF) && !strings.HasPrefix(err.Error(), "log") {
			t.Fatalf("the error does not name the log: %v", err)
		}
	})
}
