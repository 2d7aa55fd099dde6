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

// BuildOptions are the choices of [Index.Build].
type BuildOptions struct {
	Threads int  // how many goroutines compute at once; at least 1
	Resume  bool // keep what is complete in the directory; else all is built anew
	// other processes do the same at the same time, as ranks of one job: see
	// [cache.Options.Together]
	Together bool
	Progress func(cache.Event) // told what happens, if not nil; calls do not overlap
}

// Build writes the files of all datasets and blends into the cache directory, the data of each
// before its description. Without a cache directory it writes those of the datasets into the
// directories named index-cache beside the token files, and no blends.
//
// With Resume, files that another program left are kept if they have the right sizes, except for
// blends: their names do not tell what is in them, so they are computed and compared, and a
// difference is an error.
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
			// a blend waits for the processor elsewhere
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

// works is what the units of one build share.
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

// doubt compares the blends that another program left in the directory with what they must be.
func (w *works) doubt(ctx context.Context, dir string) error {
	g, ctx := errgroup.WithContext(ctx)
	for _, b := range w.x.blends {
		marker := b.hash() + descriptionEnd
		foreign, err := there(dir, append(b.files(), marker), append(b.sizes(), int64(len(b.text))))
		if err != nil {
			return err
		}
		// A record says that the blend is ours, and its settings say what is in it.
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
				return fmt.Errorf("%s: another program left %s in %s, and it is another's: it differs at byte %d. "+
					"The name of a corpus does not tell which files it is made of: "+
					"use a cache directory for this blend alone, or delete %s and what begins with %s", b.title(),
					at.File, dir, at.Offset, marker, b.hash())
			}
			return nil
		})
	}
	return g.Wait()
}

// there reports whether the files exist and have these sizes. Otherwise they would be built anew,
// right or not.
func there(dir string, names []string, sizes []int64) (bool, error) {
	for i, name := range names {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
			// a dir that is a file is refused later
			return false, err
		}
		if err != nil || info.Size() != sizes[i] {
			return false, nil
		}
	}
	return true, nil
}
