package shards

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"mula/internal/blockcache"
	"mula/internal/mapping"
	"mula/internal/objects"
)

// A remote has the files of a shard in an object store. Blocks of .bin are read through the cache
// of remote files when they are needed. .sums is fetched as a whole at the first read, .idx and
// .docs.arrow when they are first used.
type remote struct {
	cache *blockcache.Cache
	bin   *blockcache.File
	stats map[string]objects.Info // of .bin and .idx, by suffix

	header *Index // has only the element type and the counts

	indexLock sync.Mutex
	index     *Index // nil until it is used

	sumsLock sync.Mutex
	sums     *blockSums // nil until they are used, or if the shard has none
}

// FetchManifest is [ReadManifest] for a URL.
func FetchManifest(ctx context.Context, url string) (*Manifest, error) {
	data, _, err := objects.ReadFile(ctx, url, maxManifest+1)
	if err != nil {
		return nil, ignoreAbsent(err)
	}
	return decodeManifest(url, data)
}

// openRemote opens a shard in an object store. It needs the time of one request, and without a
// manifest the time of three.
func (s *Shard) openRemote(ctx context.Context) error {
	cache, err := blockcache.Default()
	if err != nil {
		return err
	}
	r := &remote{cache: cache}
	var bin, idx objects.Info
	var binErr, idxErr error
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { bin, binErr = objects.Stat(gctx, s.prefix+binExt); return ignoreAbsent(binErr) })
	g.Go(func() error { idx, idxErr = objects.Stat(gctx, s.prefix+idxExt); return ignoreAbsent(idxErr) })
	g.Go(func() (err error) {
		s.manifest, err = FetchManifest(gctx, s.prefix+manifestExt)
		return err
	})
	if err := g.Wait(); err != nil {
		return fmt.Errorf("opening shard: %w", err)
	}
	switch {
	case idxErr != nil && binErr == nil:
		return neverFinished(s.prefix, idxErr)
	case idxErr != nil:
		return fmt.Errorf("opening index: %w", idxErr)
	case binErr != nil:
		return fmt.Errorf("opening shard: %w", binErr)
	}
	if s.manifest != nil || s.sidecar == "" {
		s.sidecar = s.prefix
	} else if s.manifest, err = ReadManifest(s.sidecar + manifestExt); err != nil {
		return err
	} else if s.manifest == nil {
		s.sidecar = s.prefix
	}
	r.stats = map[string]objects.Info{binExt: bin, idxExt: idx}
	s.remote, s.idxBytes = r, idx.Size
	x, err := r.facts(ctx, s, idx)
	if err != nil {
		return err
	}
	if err := x.holdsTokens(bin.Size, s.prefix+binExt); err != nil {
		return err
	}
	s.dtype, s.tokens, s.documents, r.header = x.dtype, x.elements, x.documents, x
	if r.bin, err = r.cached(ctx, s.prefix+binExt, bin); err != nil {
		return err
	}
	if s.manifest == nil {
		return nil
	}
	return s.checkManifest()
}

func ignoreAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// facts returns an Index with the element type and the counts only, from the manifest or from the
// first and last entries of .idx.
func (r *remote) facts(ctx context.Context, s *Shard, idx objects.Info) (*Index, error) {
	x := &Index{path: s.prefix + idxExt}
	if m := s.manifest; m != nil {
		x.dtype, x.elements, x.documents, x.sequences = m.DType, m.Tokens, m.Documents, m.Documents
		return x, nil
	}
	file, err := r.cached(ctx, x.path, idx)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	err = x.parse(idx.Size, func(from int64, n int) ([]byte, error) {
		return readBytes(ctx, file, from, from+int64(n))
	})
	return x, err
}

// cached opens an object of a known version through the cache.
func (r *remote) cached(ctx context.Context, url string, info objects.Info) (*blockcache.File, error) {
	object, err := objects.OpenVersion(ctx, url, info)
	if err != nil {
		return nil, err
	}
	return r.cache.File(identity(url, info), info.Size, object), nil
}

// readBytes returns the bytes [from, end) of a cached file.
func readBytes(ctx context.Context, f *blockcache.File, from, end int64) ([]byte, error) {
	const block = blockcache.Block
	first := from / block
	p := make([]byte, min((end+block-1)/block*block, f.Size())-first*block)
	if err := f.ReadBlocks(ctx, p, first); err != nil {
		return nil, err
	}
	return p[from-first*block : end-first*block : end-first*block], nil
}

// summed reports whether the shard has block sums.
func (r *remote) summed(s *Shard) bool {
	return s.manifest != nil && s.manifest.Files["sums"].SHA256 != ""
}

// openSums fetches .sums, which must match the manifest. It returns nil if the shard has no sums.
func (r *remote) openSums(ctx context.Context, s *Shard) (*blockSums, error) {
	r.sumsLock.Lock()
	defer r.sumsLock.Unlock()
	if r.sums != nil || !r.summed(s) {
		return r.sums, nil
	}
	path := s.sidecar + sumsExt
	var file mapping.File
	var err error
	if objects.IsURL(path) {
		file, err = r.mapLocal(ctx, path, s.manifest.Files["sums"])
	} else {
		file, err = mapping.Open(path)
	}
	if err != nil {
		return nil, fmt.Errorf("opening the sums of a shard: %w", err)
	}
	sums, err := parseSums(path, file, s.binBytes())
	if err != nil {
		return nil, err
	}
	r.sums = sums[0]
	return r.sums, nil
}

// blockSums returns the shard's sums, or nil if it has none.
func (s *Shard) blockSums(ctx context.Context) (*blockSums, error) {
	if s.remote != nil {
		return s.remote.openSums(ctx, s)
	}
	return s.sums, nil
}

// FetchedWhole returns the sizes of .sums and .idx of a shard that mula wrote, from its counts. A
// reader of a shard in an object store fetches both as a whole, .idx if it needs documents.
func FetchedWhole(d DType, tokens, documents int64) (sums, idx int64) {
	blocks := (tokens*int64(d.Size()) + sumsBlock - 1) / sumsBlock
	return sumsHeaderSize + 4*blocks + 4, idxHeaderSize + 12*documents + 8*(documents+1)
}

// local fetches an object and returns the path of the local copy. The object must match want, its
// entry in the manifest. The zero FileInfo matches everything.
func (r *remote) local(ctx context.Context, url string, want FileInfo) (string, error) {
	if want == (FileInfo{}) {
		object, err := objects.Open(ctx, url)
		if err != nil {
			return "", err
		}
		return r.cache.Whole(ctx, identity(url, object.Info()), object.Info().Size, object, nil)
	}
	// The hash names the content, so no request is needed for the object's version.
	object, err := objects.OpenVersion(ctx, url, objects.Info{Size: want.Bytes})
	if err != nil {
		return "", err
	}
	return r.cache.Whole(ctx, "sha256 "+want.SHA256, want.Bytes, object, func(sha256hex string) error {
		if sha256hex != want.SHA256 {
			return wrongFile(url, want, FileInfo{want.Bytes, sha256hex})
		}
		return nil
	})
}

// mapLocal maps the local copy of an object.
func (r *remote) mapLocal(ctx context.Context, url string, want FileInfo) (mapping.File, error) {
	return mapCopy(func() (string, error) { return r.local(ctx, url, want) })
}

// mapCopy maps a local copy in the cache. fetch returns its path.
func mapCopy(fetch func() (path string, err error)) (file mapping.File, err error) {
	for range 3 { // another process may remove the copy before it is mapped
		path, err := fetch()
		if err != nil {
			return mapping.File{}, err
		}
		if file, err = mapping.Open(path); !errors.Is(err, fs.ErrNotExist) {
			return file, err
		}
	}
	return file, err
}

// openIndex returns the complete .idx of the shard, which must match the manifest.
func (r *remote) openIndex(ctx context.Context, s *Shard) (*Index, error) {
	r.indexLock.Lock()
	defer r.indexLock.Unlock()
	if r.index != nil {
		return r.index, nil
	}
	var want FileInfo
	if s.manifest != nil {
		want = s.manifest.Files["idx"]
	}
	x := &Index{path: s.prefix + idxExt}
	var err error
	if x.file, err = r.mapLocal(ctx, x.path, want); err != nil {
		return nil, fmt.Errorf("opening index: %w", err)
	}
	x.file.Scattered()
	err = mapping.Guard(x.open)
	switch {
	case err != nil:
	case x.dtype != s.dtype || x.elements != s.tokens || x.documents != s.documents:
		err = x.corrupt("it has %d tokens of type %s in %d documents, but the shard has %d of type %s in %d",
			x.elements, x.dtype, x.documents, s.tokens, s.dtype, s.documents)
	case s.manifest != nil && !s.manifest.Foreign() && x.sequences != x.documents:
		err = x.corrupt("%d documents with %d sequences, but the manifest says one each", x.documents, x.sequences)
	}
	if err != nil {
		x.Close()
		return nil, err
	}
	r.index = x
	return x, nil
}

// FetchIndex fetches the .idx of a shard in an object store into the cache of remote files, and
// opens it like [OpenIndex]. It needs no other file of the shard.
func FetchIndex(ctx context.Context, prefix string) (*Index, error) {
	cache, err := blockcache.Default()
	if err != nil {
		return nil, err
	}
	x := &Index{path: prefix + idxExt}
	object, err := objects.Open(ctx, x.path)
	if err != nil {
		return nil, fmt.Errorf("opening index: %w", err)
	}
	info := object.Info()
	x.modified = info.Modified
	x.file, err = mapCopy(func() (string, error) {
		return cache.Whole(ctx, identity(x.path, info), info.Size, object, nil)
	})
	if err != nil {
		return nil, fmt.Errorf("opening index: %w", err)
	}
	x.file.Scattered()
	if err := mapping.Guard(x.open); err != nil {
		x.Close()
		return nil, err
	}
	return x, nil
}

// read returns the bytes [from, end) of .bin, whose blocks match their sums. The caller may keep
// them.
func (r *remote) read(ctx context.Context, s *Shard, from, end int64) ([]byte, error) {
	if from == end {
		return nil, nil
	}
	sums, err := r.openSums(ctx, s)
	if err != nil {
		return nil, err
	}
	align := int64(1)
	if sums != nil {
		align = sums.block
	}
	start := from / align * align
	data, err := readBytes(ctx, r.bin, start, min((end+align-1)/align*align, r.bin.Size()))
	if err != nil {
		return nil, err
	}
	if sums != nil {
		for at := int64(0); at < int64(len(data)); at += align {
			if b := (start + at) / align; !sums.matches(data[at:min(at+align, int64(len(data)))], b) {
				return nil, s.damage(ctx, "", []int64{b})
			}
		}
	}
	return data[from-start : end-start : end-start], nil
}

// rightBlock reports whether a block of .bin matches its sum.
func (s *Shard) rightBlock(ctx context.Context, sums *blockSums, block int64) (bool, error) {
	if s.remote == nil {
		return sums.right(s.bin.Data, block), nil
	}
	data, err := readBytes(ctx, s.remote.bin, block*sums.block, min((block+1)*sums.block, s.binBytes()))
	return err == nil && sums.matches(data, block), err
}

// Remote reports whether the shard is in an object store, so that reads may wait for a network.
func (s *Shard) Remote() bool { return s.remote != nil }

// Fetch reads the tokens [from, to) of a shard in an object store into the cache of remote files,
// so that [Shard.Read] does not wait, except for tokens that another call is reading. It also
// fetches .idx if index is set. It does nothing for a local shard.
func (s *Shard) Fetch(ctx context.Context, from, to int64, index bool) error {
	if s.remote == nil {
		return nil
	}
	if from < 0 || to < from || to > s.tokens {
		return fmt.Errorf("%s: token range [%d, %d) exceeds its %d tokens", s.prefix+binExt, from, to, s.tokens)
	}
	g, ctx := errgroup.WithContext(ctx)
	if index {
		g.Go(func() error { _, err := s.remote.openIndex(ctx, s); return err })
	}
	if size := int64(s.dtype.Size()); from < to {
		g.Go(func() error { _, err := s.remote.openSums(ctx, s); return err })
		g.Go(func() error { return s.remote.bin.Fetch(ctx, from*size, to*size) })
	}
	return g.Wait()
}

// replaced reports whether .bin or .idx is now another object.
func (r *remote) replaced(prefix string) bool {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	for suffix, was := range r.stats {
		now, err := objects.Stat(ctx, prefix+suffix)
		if err != nil || now.Version != was.Version || now.Size != was.Size {
			return true
		}
	}
	return false
}

func (r *remote) close() (err error) {
	if r.bin != nil {
		err = r.bin.Close()
	}
	if r.index != nil {
		err = errors.Join(err, r.index.Close())
	}
	if r.sums != nil {
		err = errors.Join(err, r.sums.close())
	}
	return err
}

// identity names an object and its version, for the cache of remote files. The blocks of an object
// without a version are used only through this File: the object may change unnoticed.
func identity(url string, info objects.Info) string {
	version := info.Version
	switch {
	case version == "" && info.Modified.IsZero():
		version = rand.Text()
	case version == "":
		version = info.Modified.UTC().Format(time.RFC3339Nano)
	}
	return url + "\n" + version + "\n" + strconv.FormatInt(info.Size, 10)
}
