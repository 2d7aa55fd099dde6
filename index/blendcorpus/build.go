package blendcorpus

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"path/filepath"
	"syscall"

	"golang.org/x/sync/errgroup"

	"mula/index/cache"
	"mula/index/gpt"
	"mula/index/rebuild"
	"mula/internal/filesystem"
)

// Build writes the files of all datasets and blends into the cache directory, the data of each
// before its description. Without a cache directory, Build writes the datasets into the directories
// named index-cache next to the token files, and writes no blends.
//
// With Resume, Build keeps files from another program if they have the right sizes, except for
// blends. The name of a blend does not determine its contents, so Build computes the blend and
// compares. A difference is an error.
func (x *Index) Build(ctx context.Context, o rebuild.BuildOptions) (cache.Summary, error) {
	w := gpt.NewWorkers(o.Threads)
	if x.config.Cache != "" && o.Resume {
		if err := x.compareForeign(ctx, w, filesystem.Default(o.FS), x.config.Cache); err != nil {
			return cache.Summary{}, err
		}
	}
	var units rebuild.Units
	if x.config.Cache != "" {
		for _, b := range x.blends {
			u, err := b.unit(w)
			if err != nil {
				return cache.Summary{}, err
			}
			units.AddBlend(x.config.Cache, u)
		}
	}
	for _, d := range x.datasets {
		u, err := d.unit(w, o.Together)
		if err != nil {
			return cache.Summary{}, err
		}
		units.AddDataset(x.directory(d), u)
	}
	return units.Build(ctx, w, o)
}

// directory returns the directory of a dataset's files.
func (x *Index) directory(d *dataset) string {
	if x.config.Cache != "" {
		return x.config.Cache
	}
	return d.besides(x.config.Root)
}

func (b *blend) unit(w *gpt.Workers) (cache.Unit, error) {
	settings, err := b.settings()
	sizes := b.sizes()
	return cache.Unit{
		Name: b.title(), Files: b.files(), Marker: b.hash() + descriptionEnd, MarkerText: []byte(b.text),
		Settings: settings,
		Expect:   sizes[0] + sizes[1],
		Sizes:    func(context.Context) ([]int64, error) { return sizes, nil },
		Build: func(ctx context.Context, files []io.WriterAt) error {
			return b.write(ctx, files, w.Pool, w.Threads())
		},
	}, err
}

// unit returns the unit of a dataset. With together, a large dataset is divided between processes.
func (d *dataset) unit(w *gpt.Workers, together bool) (cache.Unit, error) {
	settings, err := d.settings()
	sizes := d.sizes()
	u := cache.Unit{
		Name: d.title(), Files: d.files(), Marker: d.hash + descriptionEnd, MarkerText: []byte(d.text(d.epochs)),
		Settings: settings,
		Expect:   sizes[0] + sizes[1] + sizes[2],
		Sizes:    func(context.Context) ([]int64, error) { return sizes, nil },
		Build: func(ctx context.Context, files []io.WriterAt) error {
			return w.Build(ctx, &d.gpt, d.layout, files)
		},
	}
	if together {
		u.Parts = d.gpt.Parts()
	}
	return u, err
}

// compareForeign compares the blends that another program left in the directory with the expected
// contents.
func (x *Index) compareForeign(ctx context.Context, w *gpt.Workers, fsys filesystem.FS, dir string) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, b := range x.blends {
		marker := b.hash() + descriptionEnd
		foreign, err := there(fsys, dir, append(b.files(), marker), append(b.sizes(), int64(len(b.text))))
		if err != nil {
			return err
		}
		// With a record, mula built the blend, and the record's settings describe the contents.
		if !foreign {
			continue
		}
		if _, err := fsys.Stat(filepath.Join(dir, cache.StateDir, marker+".json")); err == nil {
			continue
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		g.Go(func() error {
			files, err := rebuild.OpenFiles(fsys, dir, b.files())
			if err != nil {
				return err
			}
			defer files.Close()
			at, err := files.Difference(b.sizes(), func(to []io.WriterAt) error {
				if err := b.write(ctx, to, w.Pool, w.Threads()); err != nil {
					return fmt.Errorf("%s: %w", b.title(), err)
				}
				return nil
			})
			if err != nil {
				return err
			}
			if at != nil {
				return fmt.Errorf("%s: %s in %s was written by another program for a different blend: it differs at "+
					"byte %d. The name of a corpus does not show which files it contains; use a separate cache "+
					"directory for this blend, or delete %s and the files whose names start with %s", b.title(),
					at.File, dir, at.Offset, marker, b.hash())
			}
			return nil
		})
	}
	return g.Wait()
}

// there reports whether the files exist and have these sizes. Other files are rebuilt, right or
// wrong.
func there(fsys filesystem.FS, dir string, names []string, sizes []int64) (bool, error) {
	for i, name := range names {
		info, err := fsys.Stat(filepath.Join(dir, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
			// if dir is a file, a later check fails
			return false, err
		}
		if err != nil || info.Size() != sizes[i] {
			return false, nil
		}
	}
	return true, nil
}
