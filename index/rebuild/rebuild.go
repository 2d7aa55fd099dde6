// Package rebuild builds and verifies the index caches of other frameworks. A cache is a directory
// of units ([cache.Unit]). A unit is a dataset or a blend. The packages above know the names and
// the contents of the units of one framework.
package rebuild

import (
	"cmp"
	"context"
	"fmt"
	"slices"

	"mula/index/cache"
	"mula/index/gpt"
	"mula/internal/filesystem"
)

// Split identifies a split of the data.
type Split uint8

// The splits, in the order of the frameworks.
const (
	Train Split = iota
	Valid
	Test
)

var splitNames = [...]string{"train", "valid", "test"}

// String returns the name of the split in descriptions and file names.
func (s Split) String() string {
	if int(s) < len(splitNames) {
		return splitNames[s]
	}
	return fmt.Sprintf("split(%d)", uint8(s))
}

// SplitNamed returns the split with the given name.
func SplitNamed(name string) (Split, bool) {
	at := slices.Index(splitNames[:], name)
	return Split(max(at, 0)), at >= 0
}

// BuildOptions are the options of [Units.Build].
type BuildOptions struct {
	Threads int  // number of goroutines that compute; at least 1
	Resume  bool // keep complete files in the directory; otherwise everything is rebuilt
	// other processes, such as the ranks of a job, build the same files at the same time: see
	// [cache.Options.Together]
	Together bool
	FS       filesystem.FS     // of the directory, see [cache.Options.FS]
	Progress func(cache.Event) // receives events, if not nil; calls do not overlap
}

// Units are the units of a build by directory.
type Units struct{ directories []*directory }

type directory struct {
	path             string
	blends, datasets []cache.Unit
}

// in returns the directory with the given path, and adds it if it is new.
func (u *Units) in(path string) *directory {
	for _, d := range u.directories {
		if d.path == path {
			return d
		}
	}
	d := &directory{path: path}
	u.directories = append(u.directories, d)
	return d
}

// AddBlend adds the unit of a blend to a directory.
func (u *Units) AddBlend(path string, blend cache.Unit) {
	d := u.in(path)
	d.blends = append(d.blends, blend)
}

// AddDataset adds the unit of a dataset to a directory.
func (u *Units) AddDataset(path string, dataset cache.Unit) {
	d := u.in(path)
	d.datasets = append(d.datasets, dataset)
}

// Build builds the units, one directory after the other, with the threads of w. Blends are first,
// because they take longest, then datasets by size.
func (u *Units) Build(ctx context.Context, w *gpt.Workers, o BuildOptions) (cache.Summary, error) {
	var total cache.Summary
	for _, d := range u.directories {
		slices.SortStableFunc(d.datasets, func(a, b cache.Unit) int { return cmp.Compare(b.Expect, a.Expect) })
		s, err := cache.Run(ctx, d.path, slices.Concat(d.blends, d.datasets), cache.Options{
			// a blend waits for a thread, and datasets have priority
			Threads: w.Places() + len(d.blends), Resume: o.Resume, Together: o.Together, Progress: o.Progress,
			FS: o.FS,
		})
		total.Add(s)
		if err != nil {
			return total, err
		}
	}
	return total, nil
}
