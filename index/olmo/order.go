// Package olmo computes the values that OLMo-core derives from a list of token files: the order of
// the instances, the file of the order, and the fingerprint of the data set.
//
// OLMo-core looks for the order of an epoch in its work directory, under a name of five numbers
// ([Order.Name]), and uses the file if it exists. So an unmodified OLMo-core trains on an order
// that another program wrote.
package olmo

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sync/errgroup"

	"mula/index/numpy"
	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/objects"
)

// Order holds the parameters of OLMo-core's order of one epoch (NumpyFSLDataLoader).
type Order struct {
	Instances int64 // of the data set; less than 2^32-1
	// number of consecutive instances that stay together: maximum target sequence length / sequence
	// length, normally 1
	Chunk   int64
	Shuffle bool  // otherwise the instances are in file order, and Seed and Epoch are ignored
	Seed    int64 // 0 or more
	Epoch   int64 // OLMo-core counts from 1
}

// maxInstances is OLMo-core's limit on the instances of a data set.
const maxInstances = math.MaxUint32 - 1

// chunkBytes is how many bytes are written or compared at a time.
const chunkBytes = 8 << 20

// Check returns an error if the order is invalid.
func (o Order) Check() error {
	switch {
	case o.Instances < 1:
		return fmt.Errorf("%d instances: every file is shorter than an instance; use longer files or a shorter "+
			"sequence length", o.Instances)
	case o.Instances > maxInstances:
		return fmt.Errorf("%d instances: OLMo-core numbers them with 32 bits and supports at most %d; use a longer "+
			"sequence length or fewer files", o.Instances, int64(maxInstances))
	case o.Chunk < 1:
		return fmt.Errorf("invalid chunk of %d instances; at least 1 is needed", o.Chunk)
	case o.Entries() == 0:
		return fmt.Errorf("%d instances do not fill one chunk of %d", o.Instances, o.Chunk)
	case o.Shuffle && (o.Seed < 0 || o.Epoch < 0 || o.Seed > math.MaxInt64-o.Epoch):
		return fmt.Errorf("invalid seed %d or epoch %d: both must be 0 or more, and their sum below 2^63", o.Seed,
			o.Epoch)
	}
	return nil
}

// Entries returns the number of instances in the order: all instances of complete chunks.
func (o Order) Entries() int64 { return o.Instances / o.Chunk * o.Chunk }

// Name returns the name of the file in OLMo-core's work directory.
func (o Order) Name() string {
	var b strings.Builder
	b.WriteString("global_indices")
	if o.Chunk > 1 {
		fmt.Fprintf(&b, "_chunk%d", o.Chunk)
	}
	fmt.Fprintf(&b, "_dataset_size%d", o.Instances)
	if o.Shuffle {
		fmt.Fprintf(&b, "_epoch%d_seed%d", o.Epoch, o.Seed)
	}
	b.WriteString("_v1.npy")
	return b.String()
}

// parseName returns the order that a file of this name should hold. The directory is ignored.
func parseName(path string) (Order, error) {
	name := filepath.Base(path)
	o := Order{Chunk: 1}
	rest, ok := strings.CutPrefix(name, "global_indices")
	number := func(field string) (v int64, found bool) {
		after, found := strings.CutPrefix(rest, "_"+field)
		if !found {
			return 0, false
		}
		digits := after[:len(after)-len(strings.TrimLeft(after, "0123456789"))]
		v, err := strconv.ParseInt(digits, 10, 64)
		ok = ok && err == nil
		rest = after[len(digits):]
		return v, true
	}
	if v, found := number("chunk"); found {
		o.Chunk = v
	}
	o.Instances, _ = number("dataset_size")
	o.Epoch, o.Shuffle = number("epoch")
	if o.Shuffle {
		o.Seed, _ = number("seed")
	}
	// Comparing with Name rejects leading zeros and fields in another order.
	if !ok || rest != "_v1.npy" || o.Chunk < 1 || o.Name() != name {
		return Order{}, fmt.Errorf("%q is not the name of an OLMo-core order file, such as %s", name,
			Order{Instances: 1000, Chunk: 1, Shuffle: true, Seed: 34521, Epoch: 1}.Name())
	}
	return o, o.Check()
}

// indices returns the shuffled chunk numbers: numpy.random.Generator(PCG64(seed + epoch)).shuffle
// of 0, 1, 2, …. release frees their memory.
func (o Order) indices(ctx context.Context, threads int) (a []uint32, release func(), err error) {
	if err := o.Check(); err != nil {
		return nil, nil, err
	}
	n := o.Instances / o.Chunk
	memory, release := numpy.Aligned(int(n) * 4)
	a = unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(memory))), n)
	for i := range a {
		a[i] = uint32(i)
	}
	if o.Shuffle {
		s := numpy.Shuffler{Threads: threads}
		defer s.Release()
		if err := s.Uint32(ctx, numpy.NewGenerator(uint64(o.Seed)+uint64(o.Epoch)), a); err != nil {
			release()
			return nil, nil, err
		}
	}
	return a, release, nil
}

// expand writes entries first, first+1, … of the order into dst.
func (o Order) expand(dst, indices []uint32, first int64) {
	c := o.Chunk
	k, r := first/c, first%c
	for i := range dst {
		dst[i] = uint32(int64(indices[k])*c + r)
		if r++; r == c {
			k, r = k+1, 0
		}
	}
}

// Write writes the order to dir, a folder of fsys or its URL, under its name, replacing an existing
// file, and returns the path. fsys may be nil, for the machine's file system. Write needs 4 bytes
// of memory per instance and the shuffle's scratch memory.
func (o Order) Write(ctx context.Context, fsys filesystem.FS, dir string, threads int) (string, error) {
	indices, release, err := o.indices(ctx, threads)
	if err != nil {
		return "", err
	}
	defer release()
	return o.WriteFunc(ctx, fsys, dir, threads, o.Entries(), o.fill(indices))
}

// fill returns the order as a fill function for [Order.WriteFunc].
func (o Order) fill(indices []uint32) func(ctx context.Context, first int64, ids []uint32) error {
	return func(_ context.Context, first int64, ids []uint32) error {
		if o.Chunk == 1 {
			copy(ids, indices[first:])
		} else {
			o.expand(ids, indices, first)
		}
		return nil
	}
}

// WriteFunc writes any order of the instances, including repetitions and omissions, under the name
// of o, for OLMo-core to use instead of o. fill sets ids to the instances at positions first,
// first+1, …. Up to threads goroutines call it at once, once for every range, in any order. entries
// is the number of positions. OLMo-core needs a position for each instance of each of its batches;
// by convention, entries is the number of instances.
func (o Order) WriteFunc(ctx context.Context, fsys filesystem.FS, dir string, threads int, entries int64,
	fill func(ctx context.Context, first int64, ids []uint32) error) (string, error) {
	if err := o.Check(); err != nil {
		return "", err
	}
	if entries < 1 || entries > math.MaxInt64/4 {
		return "", fmt.Errorf("invalid order of %d entries", entries)
	}
	path := objects.Join(dir, o.Name())
	file, err := atomicfile.On(fsys).CreateImage(path, entries*4)
	if err != nil {
		return "", err
	}
	defer file.Abort()
	const per = chunkBytes / 4
	var next atomic.Int64
	g, ctx := errgroup.WithContext(ctx)
	for range min(max(threads, 1), int((entries+per-1)/per)) {
		g.Go(func() error {
			memory, release := numpy.Aligned(int(min(entries, per)) * 4)
			defer release()
			all := unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(memory))), len(memory)/4)
			for {
				first := (next.Add(1) - 1) * per
				if first >= entries {
					return nil
				}
				if err := ctx.Err(); err != nil {
					return context.Cause(ctx)
				}
				ids := all[:min(per, entries-first)]
				if err := fill(ctx, first, ids); err != nil {
					return err
				}
				for i, id := range ids {
					if int64(id) >= o.Instances {
						return fmt.Errorf("writing %s: position %d is instance %d, but there are only %d", path,
							first+int64(i), id, o.Instances)
					}
				}
				if _, err := file.WriteAt(memory[:len(ids)*4], first*4); err != nil {
					return err
				}
			}
		})
	}
	if err := g.Wait(); err != nil {
		return "", err
	}
	return path, file.Publish()
}

// A difference is the first position at which a file differs from the expected order.
type difference struct {
	Path      string
	Position  int64  // in the order
	Got, Want uint32 // instances
}

func (d *difference) Error() string {
	return fmt.Sprintf("%s: position %d (byte %d) is instance %d, but the order has %d", d.Path, d.Position,
		d.Position*4, d.Got, d.Want)
}

// Verify computes the order and compares the file at path with it. If the file has the right size
// and different contents, the error names the first position that differs. fsys is as for
// [Order.Write].
func (o Order) Verify(ctx context.Context, fsys filesystem.FS, path string, threads int) error {
	if err := o.Check(); err != nil {
		return err
	}
	f, err := openOrder(fsys, path, o.Entries())
	if err != nil {
		return err
	}
	defer f.Close()
	indices, release, err := o.indices(ctx, threads)
	if err != nil {
		return err
	}
	defer release()
	return compare(ctx, f, o.Entries(), o.fill(indices))
}

// VerifyFunc is [Order.Verify] for a file that [Order.WriteFunc] wrote. fill is called for
// consecutive ranges of positions.
func VerifyFunc(ctx context.Context, fsys filesystem.FS, path string, entries int64,
	fill func(ctx context.Context, first int64, ids []uint32) error) error {
	f, err := openOrder(fsys, path, entries)
	if err != nil {
		return err
	}
	defer f.Close()
	return compare(ctx, f, entries, fill)
}

// openOrder opens a file that should have the given number of entries.
func openOrder(fsys filesystem.FS, path string, entries int64) (filesystem.File, error) {
	f, err := filesystem.Open(filesystem.Default(fsys), path)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if want := entries * 4; err == nil && info.Size() != want {
		err = fmt.Errorf("%s has %d bytes, but an order of %d entries has %d", path, info.Size(), entries, want)
	}
	if err != nil {
		f.Close()
		return nil, err
	}
	return f, nil
}

// compare finds the first entry of a file that differs from fill.
func compare(ctx context.Context, f filesystem.File, entries int64, fill func(ctx context.Context, first int64,
	ids []uint32) error) error {
	const per = chunkBytes / 4
	memory, releaseChunk := numpy.Aligned(chunkBytes)
	defer releaseChunk()
	got, want := unsafe.Slice((*uint32)(unsafe.Pointer(unsafe.SliceData(memory))), per), make([]uint32, per)
	for first := int64(0); first < entries; first += per {
		if err := ctx.Err(); err != nil {
			return context.Cause(ctx)
		}
		n := min(per, entries-first)
		if _, err := f.ReadAt(memory[:n*4], first*4); err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return fmt.Errorf("reading %s: %w", f.Name(), err)
		}
		if err := fill(ctx, first, want[:n]); err != nil {
			return err
		}
		for i, id := range got[:n] {
			if id != want[i] {
				return &difference{f.Name(), first + int64(i), id, want[i]}
			}
		}
	}
	return nil
}
