package index

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"os"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// drawLocality draws a locality, or none.
func drawLocality(t *rapid.T) Locality {
	if rapid.Bool().Draw(t, "everywhere") {
		return Locality{}
	}
	return Locality{rapid.Int64Range(1, 40).Draw(t, "block"), rapid.Int64Range(1, 12).Draw(t, "group")}
}

// listedEpoch lists the windows of an epoch by the rules of the format page.
func listedEpoch(seed uint64, source string, epoch, n int64, l Locality) (windows []int64) {
	permuted := func(list []int64, key uint64) (out []int64) {
		p := newPermutation(uint64(len(list)), key)
		for i := range list {
			out = append(out, list[p.At(uint64(i))])
		}
		return out
	}
	all := make([]int64, n)
	for i := range all {
		all[i] = int64(i)
	}
	if l == (Locality{}) {
		return permuted(all, Key(seed, source, epoch))
	}
	blocks := slices.Collect(slices.Chunk(all, int(l.Block)))
	numbers := make([]int64, len(blocks))
	for i := range numbers {
		numbers[i] = int64(i)
	}
	numbers = permuted(numbers, labelledKey("mula blocks 1", seed, source, epoch))
	group := int64(0)
	for part := range slices.Chunk(numbers, int(l.Group)) {
		var list []int64
		for _, b := range part {
			list = append(list, blocks[b]...)
		}
		windows = append(windows, permuted(list, labelledKey("mula group 1", seed, source, epoch, group))...)
		group++
	}
	return windows
}

// The vectors are the output of testdata/blocks_v1.py, which was written from the format page. They
// are frozen: a change would change the meaning of plans.
func TestBlocksVectors(t *testing.T) {
	data, err := os.ReadFile("testdata/blocks_v1.json")
	if err != nil {
		t.Fatal(err)
	}
	var v struct {
		Epochs []struct {
			Seed           uint64
			Name           string
			Epoch, Windows int64
			Block, Group   int64
			First          []int64
			Last           int64
			SHA256         string
		}
	}
	if err := json.Unmarshal(data, &v); err != nil || len(v.Epochs) == 0 {
		t.Fatal(err, len(v.Epochs))
	}
	for _, e := range v.Epochs {
		p := newBlockPermutation(e.Seed, e.Name, e.Epoch, e.Windows, Locality{e.Block, e.Group})
		all := make([]int64, e.Windows)
		p.fill(all, 0)
		var b []byte
		for _, w := range all {
			b = binary.LittleEndian.AppendUint64(b, uint64(w))
		}
		sum := sha256.Sum256(b)
		if !slices.Equal(all[:len(e.First)], e.First) || all[len(all)-1] != e.Last ||
			hex.EncodeToString(sum[:]) != e.SHA256 {
			t.Errorf("%+v: the order starts with %d", e, all[:len(e.First)])
		}
	}
}

// At, Fill and Inverse agree with the list, in every epoch.
func TestBlocksAreThoseOfTheList(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seed := rapid.Uint64().Draw(t, "seed")
		n := rapid.Int64Range(1, 500).Draw(t, "windows")
		l := drawLocality(t)
		o := NewLocalOrder(seed, "s", n, l)
		filled := make([]int64, 3*n)
		o.Fill(filled, 0)
		for epoch := range int64(3) {
			for i, want := range listedEpoch(seed, "s", epoch, n, l) {
				k := epoch*n + int64(i)
				if e, w := o.At(k); e != epoch || w != want || filled[k] != want || o.Inverse(epoch, want) != k {
					t.Fatalf("sample %d: window %d of epoch %d, Fill %d, want %d; Inverse %d", k, w, e, filled[k],
						want, o.Inverse(epoch, want))
				}
			}
		}
	})
}

// A source of 10^12 windows needs no list. Every group draws from its own blocks.
func TestBlocksOfLargeSources(t *testing.T) {
	l := Locality{Block: 1000, Group: 64}
	const n = 1_000_000_000_003
	p := newBlockPermutation(1, "s", 0, n, l)
	for _, group := range []int64{0, 1, p.shortGroup, p.shortGroup + 1, 15_624_999, 15_625_000} {
		from, end := p.start(group), p.start(group+1)
		blocks := map[int64]bool{}
		for i := from; i < end; i++ {
			w := p.at(i)
			blocks[w/l.Block] = true
			if p.inverse(w) != i || w < 0 || w >= n {
				t.Fatalf("index %d: window %d, whose index is %d", i, w, p.inverse(w))
			}
		}
		if want := min(l.Group, (n+l.Block-1)/l.Block-group*l.Group); int64(len(blocks)) != want {
			t.Errorf("group %d draws from %d blocks, want %d", group, len(blocks), want)
		}
	}
}

func TestLocalityCheck(t *testing.T) {
	for l, want := range map[Locality]string{{1, 1}: "", {1 << 24, 1 << 24}: "", {0, 1}: "block is 0",
		{1, -1}: "group is -1", {1<<24 + 1, 1}: "block is 16777217"} {
		if err := l.Check(); (err == nil) != (want == "") || err != nil && !strings.Contains(err.Error(), want) {
			t.Errorf("%v: %v, want %q", l, err, want)
		}
	}
}
