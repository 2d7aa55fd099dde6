package sample

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// content returns bytes that differ from block to block, as testdata/sample_v1.py does.
func content(size int) []byte {
	var data []byte
	for i := range size/4 + 1 {
		data = binary.LittleEndian.AppendUint32(data, uint32(i))
	}
	return data[:size]
}

// The sample is the sample of testdata/sample_v1.py.
func TestVectors(t *testing.T) {
	for _, v := range []struct {
		bin, idx int
		want     string
	}{
		{0, 42, "9e20238d43f55eb0d436487f685c2cbb61236d64acd7161f4f77bb5201b69bf4"},
		{100000, 16384, "1e17dd0c4a7862b1b8082bac719a89023ddce88de5afa030080f7c4db6739767"},
		{262144, 262145, "e94d222e96641fffa4fc296a3df6054f6ea1f2de79d268315c6f029ab2538b4f"},
		{5000001, 1234567, "72a55f88ca1bba78503cf41277270cc8563b962959003041977afcdbfd6e18f8"},
	} {
		prefix := filepath.Join(t.TempDir(), "x")
		write(t, prefix+".bin", content(v.bin))
		write(t, prefix+".idx", content(v.idx))
		c, err := Read(t.Context(), prefix)
		if err != nil {
			t.Fatal(err)
		}
		if got := c.Sample(); got.Hash != v.want || !Valid(got.Blocks) {
			t.Errorf("%d and %d bytes: %+v, want %s", v.bin, v.idx, got, v.want)
		}
	}
	for size, want := range map[int64][]int64{
		262145:  {0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16},
		5000001: {0, 5, 20, 28, 44, 63, 90, 105, 136, 147, 155, 176, 255, 279, 294, 305},
		8 << 40: {0, 98716843, 132457665, 142276192, 163689381, 236609704, 259157709, 273316746, 345174773,
			373978410, 383824052, 414909390, 421374192, 426106018, 527573772, 536870911},
	} {
		if diff := cmp.Diff(want, Blocks(size)); diff != "" {
			t.Errorf("%d bytes (-want +got)\n%s", size, diff)
		}
	}
}

func write(t *testing.T, path string, data []byte) {
	t.Helper()
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
}

// A change of any sampled block is found and named; a change of any other block is not found.
func TestDiffers(t *testing.T) {
	const size = 30*BlockSize + 5
	prefix := filepath.Join(t.TempDir(), "x")
	files := map[string][]byte{".bin": content(size), ".idx": content(size)}
	for suffix, data := range files {
		write(t, prefix+suffix, data)
	}
	c, err := Read(t.Context(), prefix)
	if err != nil {
		t.Fatal(err)
	}
	want, sampled := c.Sample(), Blocks(size)
	for suffix, data := range files {
		for block := range int64(31) {
			changed := slices.Clone(data)
			changed[block*BlockSize] ^= 1
			write(t, prefix+suffix, changed)
			c, err := Read(t.Context(), prefix)
			if err != nil {
				t.Fatal(err)
			}
			text := c.Differs(want)
			begin := fmt.Sprintf("block %d of its %s file, bytes ", block, suffix)
			if !slices.Contains(sampled, block) {
				if text != "" {
					t.Errorf("block %d, which is not sampled: %s", block, text)
				}
			} else if !strings.HasPrefix(text, begin) {
				t.Errorf("%q, want %q", text, begin)
			}
		}
		write(t, prefix+suffix, data)
	}
	write(t, prefix+".idx", files[".idx"][:size-1])
	if c, err = Read(t.Context(), prefix); err != nil {
		t.Fatal(err)
	}
	if text := c.Differs(want); text != "its .idx file has 491524 bytes, previously 491525" {
		t.Errorf("another size: %q", text)
	}
	for _, names := range []string{"", want.Blocks} {
		other := Sample{strings.Repeat("0", 64), names}
		if text := c.Differs(other); text == "" {
			t.Errorf("the hash differs, but with the names %q there is no difference", names)
		}
	}
}
