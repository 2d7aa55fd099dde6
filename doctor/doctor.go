// Package doctor checks whether a machine and its folders are fit for mula. A check reads facts
// from an [Environment], so that tests can plant faults.
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

const (
	// folderLimit is longer than a check of a folder takes on a slow disk. Then the file system
	// does not respond.
	folderLimit = 20 * time.Second
	// otherLimit is longer than the programs that checks start may run.
	otherLimit = pythonTime + 10*time.Second
)

// Libraries are the names of [Options.Require].
var Libraries = []string{"mpi", "opencl", "onednn", "python"}

// A check is one line. needed names the part of mula that needs the property.
type check struct {
	name, needed string
	run          func(context.Context, *probe) Result
	stop         bool // an error makes the rest of the group useless
}

// A probe has the state that the checks of a group share.
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

// Run checks everything, and calls report with each group when the group is complete. It removes
// its temporary folders, also if the context ends. It returns the context's error.
//
// A check that does not end, because a file system hangs, is an error. It continues in its own
// goroutine, which removes the temporary folder if the check ever ends.
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
		type place struct {
			path string
			u    Usage
			err  error
		}
		at, ended, err := within(ctx, e.After(folderLimit), func(context.Context) (at place) {
			at.path = f
			if len(o.Folders) == 0 {
				at.path = e.existing(f) // mula creates the cache folder when there is something to keep
			}
			if absolute, err := filepath.Abs(at.path); err == nil {
				at.path = absolute
			}
			at.u, at.err = e.Files.Usage(at.path)
			return at
		}, func(place) {})
		if err != nil {
			return err
		}
		if !ended {
			noAnswer := func(context.Context, *probe) Result { return hung(folderLimit) }
			jobs = append(jobs, job{"Folder " + f, f, "", []check{{"access", "all outputs", noAnswer, true}}})
			continue
		}
		f = at.path
		if same, ok := seen[at.u.Device]; ok && at.err == nil {
			jobs = append(jobs, job{"Folder " + f, f, same, sameFolderChecks})
			continue
		}
		if at.err == nil {
			seen[at.u.Device] = f
		}
		jobs = append(jobs, job{"Folder " + f, f, "", folderChecks})
	}
	jobs = append(jobs, job{"Libraries", "", "", libraryChecks}, job{"Clock", "", "", clockChecks},
		job{"Cache", "", "", cacheChecks}, job{"Job", "", "", jobChecks})
	for _, j := range jobs {
		p := &probe{Environment: e, folder: j.folder, same: j.same, require: o.Require,
			started: started, ticks: ticks}
		g, err := p.group(ctx, j.title, j.checks)
		if err != nil {
			return err
		}
		report(g)
	}
	return nil
}

func (p *probe) group(ctx context.Context, title string, checks []check) (Group, error) {
	g := Group{Title: title}
	// the goroutine of the check that hangs removes the temporary folder
	remove := func(context.Context) struct{} { p.remove(); return struct{}{} }
	defer func() { within(context.Background(), p.After(folderLimit), remove, func(struct{}) {}) }()
	for _, c := range checks {
		if err := ctx.Err(); err != nil {
			return g, err
		}
		limit := otherLimit
		if p.folder != "" {
			limit = folderLimit
		}
		type outcome struct {
			r    Result
			temp string
		}
		own := *p // a check that hangs shares nothing with the following checks
		done, ended, err := within(ctx, p.After(limit), func(ctx context.Context) outcome {
			r := c.run(ctx, &own)
			return outcome{r, own.temp}
		}, func(outcome) { own.remove() })
		if !ended {
			p.temp = ""
		}
		if err != nil {
			return g, err
		}
		if !ended {
			g.Lines = append(g.Lines, Line{c.name, c.needed, hung(limit)})
			if p.folder != "" {
				break
			}
			continue
		}
		p.temp = done.temp
		g.Lines = append(g.Lines, Line{c.name, c.needed, done.r})
		if done.r.Status == Error && c.stop {
			break
		}
	}
	return g, ctx.Err()
}

// remove removes the temporary folder.
func (p *probe) remove() {
	if p.temp != "" {
		p.Files.RemoveAll(p.temp)
	}
}

// hung is the result of a check that exceeded its limit.
func hung(limit time.Duration) Result {
	return failure("check the mount and its file server, or use another folder", "no answer within %v", limit)
}

// stopTime is the time in which a check ends after the context has ended.
const stopTime = time.Second

// within calls f in a goroutine and waits until f returns, the limit is reached, or the context
// ends. If f does not return in time, ended is false, and late is called when f returns.
func within[T any](ctx context.Context, limit <-chan time.Time, f func(context.Context) T, late func(T)) (result T,
	ended bool, err error) {
	done, abandoned := make(chan T), make(chan struct{})
	go func() {
		result := f(ctx)
		select {
		case done <- result:
		case <-abandoned:
			late(result)
		}
	}()
	select {
	case result = <-done:
		return result, true, nil
	case <-limit:
	case <-ctx.Done():
		select {
		case result = <-done:
			return result, true, nil
		case <-time.After(stopTime):
			err = ctx.Err()
		}
	}
	close(abandoned)
	return result, false, err
}

func (p *probe) required(library string) bool { return slices.Contains(p.require, library) }
