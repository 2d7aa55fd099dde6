package blendcorpus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"golang.org/x/sync/errgroup"

	"mula/index/cache"
	"mula/index/gpt"
)

// BuildOptions are the options of [Index.Build].
type BuildOptions struct {
	Threads int  // number of goroutines that compute; at least 1
	Resume  bool // keep complete files in the directory; otherwise everything is rebuilt
	// other processes, such as the ranks of a job, build the same files at the same time: see
	// [cache.Options.Together]
	Together bool
	Progress func(cache.Event) // receives events, if not nil; calls do not overlap
}

// Build writes the files of all datasets and blends into the cache directory, the data of each
// before its description. Without a cache directory, Build writes the datasets into the directories
// named index-cache next to the token files, and writes no blends.
//
// With Resume, Build keeps files from another program if they have the right sizes, except for
// blends. The name of a blend does not determine its contents, so Build computes the blend and
// compares. A difference is an error.
func (x *Index) Build(ctx context.Context, o BuildOptions) (cache.Summary, error) {
	o.Threads = max(1, o.Threads)
	w := &works{x, gpt.NewWorkshop(o.Threads)}
	if x.config.Cache != "" {
		if o.Resume {
			if err := w.doubt(ctx, x.config.Cache); err != nil {
				return cache.Summary{}, err
			}
		}
		units, err := w.units(x.blends, x.datasets, o.Together)
		if err != nil {
			return cache.Summary{}, err
		}
		return cache.Run(ctx, x.config.Cache, units, cache.Options{
			// a blend waits for the processor in its build function
			Threads: w.workshop.Places() + len(x.blends), Resume: o.Resume, Together: o.Together, Progress: o.Progress,
		})
	}

	var dirs []string
	members := map[string][]*dataset{}
	for _, d := range x.datasets {
		dir := d.besides(x.config.Root)
		if members[dir] == nil {
			dirs = append(dirs, dir)
		}
		members[dir] = append(members[dir], d)
	}
	var total cache.Summary
	for _, dir := range dirs {
		units, err := w.units(nil, members[dir], o.Together)
		if err != nil {
			return total, err
		}
		s, err := cache.Run(ctx, dir, units, cache.Options{Threads: w.workshop.Places(), Resume: o.Resume,
			Together: o.Together, Progress: o.Progress})
		total.Add(s)
		if err != nil {
			return total, err
		}
	}
	return total, nil
}

// works holds the state that the units of one build share.
type works struct {
	x        *Index
	workshop *gpt.Workshop
}

func (w *works) units(blends []*blend, datasets []*dataset, together bool) ([]cache.Unit, error) {
	var units []cache.Unit
	for _, b := range blends {
		settings, err := b.settings()
		if err != nil {
			return nil, err
		}
		sizes := b.sizes()
		units = append(units, cache.Unit{
			Name: b.title(), Files: b.files(), Marker: b.hash() + descriptionEnd, MarkerText: []byte(b.text),
			Settings: settings,
			Expect:   sizes[0] + sizes[1],
			Sizes:    func(context.Context) ([]int64, error) { return sizes, nil },
			Build: func(ctx context.Context, files []io.WriterAt) error {
				return b.write(ctx, files, w.workshop.Pool, w.workshop.Threads())
			},
		})
	}
	first := len(units)
	for _, d := range datasets {
		settings, err := d.settings()
		if err != nil {
			return nil, err
		}
		sizes := d.sizes()
		var parts [][]int
		if together {
			parts = d.gpt.Parts()
		}
		units = append(units, cache.Unit{
			Name: d.title(), Files: d.files(), Marker: d.hash + descriptionEnd, MarkerText: []byte(d.text(d.epochs)),
			Settings: settings,
			Expect:   sizes[0] + sizes[1] + sizes[2], Parts: parts,
			Sizes: func(context.Context) ([]int64, error) { return sizes, nil },
			Build: func(ctx context.Context, files []io.WriterAt) error {
				return w.workshop.Build(ctx, &d.gpt, d.layout, files)
			},
		})
	}
	slices.SortStableFunc(units[first:], func(a, b cache.Unit) int { return cmp.Compare(b.Expect, a.Expect) })
	return units, nil
}

// doubt compares the blends that another program left in the directory with the expected contents.
func (w *works) doubt(ctx context.Context, dir string) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, b := range w.x.blends {
		marker := b.hash() + descriptionEnd
		foreign, err := there(dir, append(b.files(), marker), append(b.sizes(), int64(len(b.text))))
		if err != nil {
			return err
		}
		// With a record, mula built the blend, and the record's settings describe the contents.
		if _, err := os.Stat(filepath.Join(dir, cache.StateDir, marker+".json")); err == nil || !foreign {
			continue
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		g.Go(func() error {
			files, err := compare(dir, b.files(), b.sizes())
			if err != nil {
				return err
			}
			defer files.close()
			if err := b.write(ctx, files.writers(), w.workshop.Pool, w.workshop.Threads()); err != nil {
				return fmt.Errorf("%s: %w", b.title(), err)
			}
			if err := files.cut(); err != nil {
				return err
			}
			if at := files.difference(); at != nil {
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
func there(dir string, names []string, sizes []int64) (bool, error) {
	for i, name := range names {
		info, err := os.Stat(filepath.Join(dir, name))
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
