// Package doctor checks whether a machine and its folders are fit for mula. A check reads facts from
// an [Environment], so that tests can plant faults.
package doctor

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"time"
)

// Status is the result of a check.
type Status string

// The statuses. A warning costs time or a feature. With an error, commands fail.
const (
	OK      Status = "ok"
	Warning Status = "warning"
	Error   Status = "error"
)

// A Result is the finding of one check. Remedy is empty if the status is ok.
type Result struct {
	Status  Status `json:"status"`
	Finding string `json:"finding"`
	Remedy  string `json:"remedy,omitempty"`
}

// A Line is a check with its result.
type Line struct {
	Name   string `json:"name"`
	Needed string `json:"needed_for,omitempty"`
	Result
}

// A Group is the lines of one heading.
type Group struct {
	Title string `json:"title"`
	Lines []Line `json:"checks"`
}

// Options select what is checked.
type Options struct {
	Folders []string // empty: the current folder and the cache folder
	Require []string // libraries that must be installed: mpi, opencl, onednn, python
}

// Libraries are the names of [Options.Require].
var Libraries = []string{"mpi", "opencl", "onednn", "python"}

// A check is one line. needed names the part of mula that needs the property.
type check struct {
	name, needed string
	run          func(context.Context, *probe) Result
	stop         bool // an error makes the rest of the group useless
}

// A probe is what the checks of a group share.
type probe struct {
	*Environment
	folder, temp string
	same         string // a folder on the same file system, for [sameFolderChecks]
	require      []string
	started      time.Time
	ticks        time.Duration
}

func ok(format string, args ...any) Result { return Result{OK, fmt.Sprintf(format, args...), ""} }

func warning(remedy, format string, args ...any) Result {
	return Result{Warning, fmt.Sprintf(format, args...), remedy}
}

func failure(remedy, format string, args ...any) Result {
	return Result{Error, fmt.Sprintf(format, args...), remedy}
}

// Run checks everything, and calls report with each group when the group is complete. It removes its
// temporary folders, also if the context ends. It returns the context's error.
func Run(ctx context.Context, e *Environment, o Options, report func(Group)) error {
	started, ticks := e.Clock.Wall(), e.Clock.Monotonic()
	cache, cacheErr := e.CacheFolder()
	folders := o.Folders
	if len(folders) == 0 {
		folders = []string{"."}
		if cacheErr == nil {
			folders = append(folders, cache)
		}
	}
	type job struct {
		title, folder, same string
		checks              []check
	}
	jobs := []job{{"Processor", "", "", processorChecks}, {"Memory", "", "", memoryChecks}}
	seen := map[uint64]string{}
	for _, f := range folders {
		if len(o.Folders) == 0 {
			f = e.existing(f) // mula creates the cache folder when there is something to keep
		}
		if absolute, err := filepath.Abs(f); err == nil {
			f = absolute
		}
		u, err := e.Files.Usage(f)
		if same, ok := seen[u.Device]; ok && err == nil {
			jobs = append(jobs, job{"Folder " + f, f, same, sameFolderChecks})
			continue
		}
		if err == nil {
			seen[u.Device] = f
		}
		jobs = append(jobs, job{"Folder " + f, f, "", folderChecks})
	}
	jobs = append(jobs, job{"Libraries", "", "", libraryChecks}, job{"Clock", "", "", clockChecks},
		job{"Cache", "", "", cacheChecks}, job{"Job", "", "", jobChecks})
	for _, j := range jobs {
		p := &probe{Environment: e, folder: j.folder, same: j.same, require: o.Require, started: started, ticks: ticks}
		g, err := p.group(ctx, j.title, j.checks)
		if err != nil {
			return err
		}
		report(g)
	}
	return nil
}

func (p *probe) group(ctx context.Context, title string, checks []check) (Group, error) {
	defer func() {
		if p.temp != "" {
			p.Files.RemoveAll(p.temp)
		}
	}()
	g := Group{Title: title}
	for _, c := range checks {
		if err := ctx.Err(); err != nil {
			return g, err
		}
		r := c.run(ctx, p)
		g.Lines = append(g.Lines, Line{c.name, c.needed, r})
		if r.Status == Error && c.stop {
			break
		}
	}
	return g, ctx.Err()
}

func (p *probe) required(library string) bool { return slices.Contains(p.require, library) }
