package gpt

import (
	"context"
	"crypto/md5"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"os"
	"testing"
)

// The files have the MD5 sums of Megatron-LM's files. testdata/golden.py wrote
// testdata/golden.json.
func TestGolden(t *testing.T) {
	text, err := os.ReadFile("testdata/golden.json")
	if err != nil {
		t.Fatal(err)
	}
	var golden struct {
		Cases []struct {
			Sequences      int64  `json:"sequences"`
			LengthSeed     uint64 `json:"length_seed"`
			Modulus        uint64 `json:"modulus"`
			Zeros          uint64 `json:"zeros"`
			First          int64  `json:"first"`
			End            int64  `json:"end"`
			SequenceLength int64  `json:"sequence_length"`
			Extra          bool   `json:"extra"`
			Partial        bool   `json:"partial"`
			Samples        int64  `json:"samples"`
			Seed           uint32 `json:"seed"`
			Fails          bool   `json:"fails"`
			Documents      string `json:"document_index"`
			SampleIndex    string `json:"sample_index"`
			Shuffle        string `json:"shuffle_index"`
		} `json:"cases"`
	}
	if err := json.Unmarshal(text, &golden); err != nil {
		t.Fatal(err)
	}
	b := &Builder{}
	defer b.Release()
	for i, c := range golden.Cases {
		if raceEnabled && c.Sequences > 1<<20 {
			continue // assembly and the Go loops around it, which smaller cases reach as well; too slow here
		}
		lengths := make([]byte, 1+4*c.Sequences)[1:]
		for i := range c.Sequences {
			h := (uint64(i+1)*0x9E3779B97F4A7C15 + c.LengthSeed) >> 33
			if h%16 >= c.Zeros {
				binary.LittleEndian.PutUint32(lengths[4*i:], uint32(h%c.Modulus))
			}
		}
		d := &Dataset{Lengths: lengths, First: c.First, End: c.End, SequenceLength: c.SequenceLength,
			ExtraToken: c.Extra, KeepPartial: c.Partial, CheckOffsets: true, Samples: c.Samples, Seed: c.Seed}
		if c.Fails {
			l, err := d.Layout()
			if err == nil {
				err = b.Build(context.Background(), d, l, Files{discard{}, discard{}, discard{}}, nil)
			}
			if err == nil {
				t.Errorf("case %d: built what Megatron-LM does not", i)
			}
			continue
		}
		got := construct(t, b, d)
		for _, f := range []struct {
			name, want string
			bytes      []byte
		}{{"document index", c.Documents, got.documents}, {"sample index", c.SampleIndex, got.samples},
			{"shuffle index", c.Shuffle, got.shuffle}} {
			if sum := fmt.Sprintf("%x", md5.Sum(f.bytes)); sum != f.want {
				t.Errorf("case %d, %+v: %s has the MD5 %s, want %s", i, c, f.name, sum, f.want)
			}
		}
	}
}
