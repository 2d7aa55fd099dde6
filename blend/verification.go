package blend

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"mula/internal/objects"
	"mula/shards"
	"mula/shards/facts"
	"mula/shards/verifier"
)

// startVerifier starts the verification of complete files: the index files of the order, then the
// shards.
func (d *Data) startVerifier(o verifier.Options) error {
	wd, err := absolutePath(".")
	if err != nil {
		return err
	}
	absolute := func(path string) string {
		if filepath.IsAbs(path) {
			return filepath.Clean(path)
		}
		return filepath.Join(wd, path)
	}
	var files []verifier.File
	for _, f := range d.order.files() {
		path := absolute(f.path)
		files = append(files, verifier.File{Path: path, Bytes: f.bytes,
			Verify: func(ctx context.Context, count func(int64)) (*facts.Facts, error) {
				return new(facts.Facts), f.verify(ctx, path, count)
			}})
	}
	d.indexFiles = len(files)
	for i := range d.Sources {
		for k, sh := range d.Sources[i].Shards {
			files = append(files, verifier.File{Path: absolute(d.ShardPath(i, k)), Shard: true,
				Bytes: sh.Tokens*int64(sh.DType.Size()) + 20*sh.Documents, // and the ends of the .idx
				Verify: func(ctx context.Context, count func(int64)) (*facts.Facts, error) {
					return d.verifyShard(ctx, i, k, count)
				}})
		}
	}
	d.verifyFirst = o.First
	if o.Complete && d.Provisional() {
		if d.file == "" || objects.IsURL(d.file) {
			return errors.New("a plan is completed in the background only if it was read from a local file and has " +
				"the paths of its shards; use `mula blend --complete`")
		}
		d.completion = &backgroundCompletion{plan: d.Plan}
	}
	d.verifier, err = verifier.Start(files, o, d.reverify)
	return err
}

// verify compares an index file, whose absolute path is given, with its hash.
func (f orderFile) verify(ctx context.Context, path string, count func(int64)) error {
	hash, _, err := shards.HashFile(ctx, path, count)
	if err == nil && hash != *f.sha256 {
		err = fmt.Errorf("%s has changed since the plan was built: SHA-256 of %s is %.16s…, was %.16s…; restore "+
			"it, or build a new plan",
			f.of, filepath.Base(path), hash, *f.sha256)
	}
	return err
}

// verifyShard compares the files of a shard with their hashes. It uses reads instead of a mapping,
// so that a slow disk blocks only this goroutine. It returns the facts of the shard. A shard that
// has only a sample, which is compared when the shard is opened, has no facts yet.
func (d *Data) verifyShard(ctx context.Context, source, shard int, count func(int64)) (*facts.Facts, error) {
	s, err := d.open(source, shard) // opened again, because the pool may close its own at any time
	if err != nil {
		return nil, err
	}
	defer s.Close()
	want := d.Sources[source].Shards[shard]
	if want.Sample != "" {
		if s.Manifest() == nil {
			if d.completion != nil {
				err = d.completion.shard(ctx, source, shard, count)
			}
			return nil, err
		}
		want.Bin, want.Index = s.Manifest().Files["bin"].SHA256, s.Manifest().Files["idx"].SHA256
	}
	for _, f := range []struct{ ending, hash string }{{".bin", want.Bin}, {".idx", want.Index}} {
		hash, _, err := shards.HashFile(ctx, s.Prefix()+f.ending, count)
		if err != nil {
			return nil, fmt.Errorf("source %q: %w", d.Sources[source].Name, err)
		}
		if hash == f.hash {
			continue
		}
		if s.Manifest() != nil {
			if err := s.Verify(ctx, count); err != nil { // names the damaged bytes
				return nil, fmt.Errorf("source %q: %w", d.Sources[source].Name, err)
			}
		}
		return nil, d.changed(source, shard, "SHA-256 of its %s file is %.16s…, was %.16s…", f.ending, hash, f.hash)
	}
	known := facts.Of(s)
	known.Bin, known.Index = want.Bin, want.Index
	known.Manifest = known.Manifest && d.sidecar(source, shard) == "" // the cache does not know the other folder
	return &known, nil
}

// admit waits, if necessary, until a shard may be read. sums tells whether the shard has sums.
func (d *Data) admit(ctx context.Context, source, shard int, sums bool) error {
	if d.verifier == nil {
		return nil
	}
	file := d.indexFiles + d.firsts[source] + shard
	if d.verifyFirst {
		for i := range d.indexFiles {
			if err := d.await(ctx, i); err != nil {
				return err
			}
		}
		if !sums {
			return d.await(ctx, file)
		}
	}
	return d.verifier.Damaged(file)
}

// errClosed is the error of reads that wait for a verification when the data is closed.
var errClosed = errors.New("the plan's data was closed")

// await waits until a file of the verifier is verified.
func (d *Data) await(ctx context.Context, file int) error {
	err := d.verifier.Await(ctx, file)
	if errors.Is(err, verifier.ErrStopped) {
		return errClosed
	}
	return err
}

// Verification returns the progress of the verification of complete files, if [OpenOptions.Verify]
// is set.
func (d *Data) Verification() verifier.Progress {
	if d.verifier == nil {
		return verifier.Progress{}
	}
	return d.verifier.Progress()
}
