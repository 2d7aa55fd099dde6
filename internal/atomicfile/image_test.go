package atomicfile

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"unsafe"

	"pgregory.net/rapid"
)

// aligned is a slice of n bytes whose memory is shift bytes past a multiple of directAlign.
func aligned(n, shift int) []byte {
	p := make([]byte, n+shift+directAlign)
	off := int(-uintptr(unsafe.Pointer(unsafe.SliceData(p)))&(directAlign-1)) + shift
	return p[off : off+n : off+n]
}

// directories are one for temporary files and, where they exist, one on a disk and one in memory.
func directories(t *testing.T) map[string]string {
	dirs := map[string]string{"temporary": t.TempDir()}
	for name, root := range map[string]string{"disk": "/var/tmp", "memory": "/dev/shm"} {
		if dir, err := os.MkdirTemp(root, "atomicfile"); err == nil {
			t.Cleanup(func() { os.RemoveAll(dir) })
			dirs[name] = dir
		}
	}
	return dirs
}

// Whatever the pieces, their order, their memory and the number of writers: the file has the bytes.
func TestImageAnyPieces(t *testing.T) {
	for name, dir := range directories(t) {
		t.Run(name, func(t *testing.T) {
			want := make([]byte, 4<<20)
			rand.NewChaCha8([32]byte{1}).Read(want)
			rapid.Check(t, func(t *rapid.T) {
				size := rapid.OneOf(rapid.IntRange(0, 3*directAlign), rapid.IntRange(directFrom-1,
					directFrom+directAlign), rapid.IntRange(directFrom, len(want))).Draw(t, "size")
				whole := rapid.SampledFrom([]int{1, 512, directAlign, 64 << 10}).Draw(t, "cut at multiples of")
				pieces := rapid.IntRange(1, 40).Draw(t, "pieces")
				misplaced := rapid.IntRange(0, 2).Draw(t, "misplaced memory")
				writers := rapid.IntRange(1, 4).Draw(t, "writers")
				rng := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))

				cuts := map[int]bool{0: true, size: true}
				for range pieces {
					cuts[rng.IntN(size+1)/whole*whole] = true
				}
				type piece struct{ begin, end int }
				var work []piece
				for begin := 0; begin < size; {
					end := begin + 1
					for !cuts[end] {
						end++
					}
					work = append(work, piece{begin, end})
					begin = end
				}
				rng.Shuffle(len(work), func(i, j int) { work[i], work[j] = work[j], work[i] })

				path := filepath.Join(dir, "x")
				m, err := CreateImage(path, int64(size))
				if err != nil {
					t.Fatal(err)
				}
				defer m.Abort()
				next := make(chan piece, len(work))
				for _, w := range work {
					next <- w
				}
				close(next)
				var g sync.WaitGroup
				for range writers {
					g.Go(func() {
						k := 0
						for w := range next {
							shift := 0
							if k++; misplaced > 0 && k%(misplaced+1) == 0 {
								shift = 8
							}
							p := aligned(w.end-w.begin, shift)
							copy(p, want[w.begin:])
							if n, err := m.WriteAt(p, int64(w.begin)); err != nil || n != len(p) {
								t.Errorf("%d of %d bytes: %v", n, len(p), err)
							}
							clear(p) // the file must not depend on it any more
						}
					})
				}
				g.Wait()
				if err := m.Publish(); err != nil {
					t.Fatal(err)
				}
				got, err := os.ReadFile(path)
				if err != nil || !bytes.Equal(got, want[:size]) {
					t.Fatalf("%d bytes, %v; want %d, or they differ", len(got), err, size)
				}
			})
			if names := list(t, dir); len(names) != 1 {
				t.Errorf("left behind: %v", names)
			}
		})
	}
}

// Where direct writing works, aligned pieces go that way: this fails when a change sends all of
// them through the page cache.
func TestImageGoesDirect(t *testing.T) {
	m, err := CreateImage(filepath.Join(t.TempDir(), "x"), 4<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Abort()
	if m.direct == nil {
		t.Skip("no direct writing in the directory for temporary files")
	}
	for _, test := range []struct {
		shift, off, n, want int
	}{
		{0, 0, 1 << 20, 1 << 20},
		{0, 1 << 20, 1<<20 + 100, 1 << 20},
		{0, 3 << 20, 100, 0},
		{0, 3<<20 + 512, 8192, 0},
		{8, 2 << 20, 8192, 0},
	} {
		n, err := m.writeDirect(aligned(test.n, test.shift), int64(test.off))
		if err != nil || n != test.want && !m.indirect.Load() {
			t.Errorf("%+v: %d, %v", test, n, err)
		}
	}
}

// A file system that takes the descriptor but not the writes: as if the page cache were the only
// way.
func TestImageRefused(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	const size = 2<<20 + 5
	m, err := CreateImage(path, size)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Abort()
	if m.direct == nil {
		t.Skip("no direct writing in the directory for temporary files")
	}
	// This file answers EINVAL to text that is not a number, like a file on a disk with larger
	// blocks.
	refusing, err := os.OpenFile("/proc/self/oom_score_adj", os.O_WRONLY, 0)
	if err != nil {
		t.Skip(err)
	}
	m.direct.Close()
	m.direct = refusing
	want := make([]byte, size)
	rand.NewChaCha8([32]byte{2}).Read(want)
	p := aligned(size, 0)
	copy(p, want)
	if n, err := m.WriteAt(p, 0); err != nil || n != size {
		t.Fatalf("%d, %v", n, err)
	}
	if err := m.Publish(); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(path); err != nil || !bytes.Equal(got, want) || !m.indirect.Load() {
		t.Errorf("other bytes, or the refusal was not seen: %v", err)
	}
}

func TestImageBounds(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	if _, err := CreateImage(path, -1); err == nil {
		t.Error("a negative size was accepted")
	}
	m, err := CreateImage(path, 10)
	if err != nil {
		t.Fatal(err)
	}
	defer m.Abort()
	for _, test := range []struct{ n, off int64 }{{11, 0}, {1, 10}, {1, -1}, {5, 1<<63 - 1}} {
		if _, err := m.WriteAt(make([]byte, test.n), test.off); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%d bytes at %d: %v", test.n, test.off, err)
		}
	}
	if _, err := m.WriteAt(make([]byte, 9), 0); err != nil {
		t.Fatal(err)
	}
	for what, f := range map[string]func() error{"Seal": m.Seal, "Rename": m.Rename, "Publish": m.Publish} {
		if err := f(); err == nil || !strings.Contains(err.Error(), "only 9 of its 10 bytes") {
			t.Errorf("%s of a file with a hole: %v", what, err)
		}
	}
	m.Abort()
	if names := list(t, filepath.Dir(path)); len(names) != 0 {
		t.Errorf("left behind: %v", names)
	}
}

func BenchmarkImage(b *testing.B) {
	const size, piece = 256 << 20, 8 << 20
	p := aligned(piece, 0)
	rand.NewChaCha8([32]byte{4}).Read(p)
	for _, shift := range []int{0, 8} {
		q := aligned(piece, shift)
		copy(q, p)
		b.Run(fmt.Sprintf("misplaced by %d", shift), func(b *testing.B) {
			path := filepath.Join(b.TempDir(), "x")
			b.SetBytes(size)
			for b.Loop() {
				m, err := CreateImage(path, size)
				if err != nil {
					b.Fatal(err)
				}
				for off := int64(size - piece); off >= 0; off -= piece {
					if _, err := m.WriteAt(q, off); err != nil {
						b.Fatal(err)
					}
				}
				if err := m.Publish(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
