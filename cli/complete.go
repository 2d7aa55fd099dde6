package cli

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/urfave/cli/v2"

	"mula/blend"
	"mula/index/cache"
	"mula/internal/launchers"
	"mula/internal/quantity"
)

// provisionalNote says that a plan is provisional, and how to complete it.
func provisionalNote(path string) string {
	return fmt.Sprintf("note: %s is provisional: shards without a manifest (.json) were sampled, not hashed. Complete "+
		"it with `mula blend --complete %s`, at any time and in any number of processes", path, path)
}

// runComplete is `mula blend --complete`.
func runComplete(c *cli.Context) error {
	for _, name := range c.LocalFlagNames() {
		switch name {
		case "complete", "output", "o", "sums", "threads", "json":
		default:
			return usagef("--%s cannot be set with --complete; remove it", name)
		}
	}
	path := c.String("complete")
	if path == "" {
		return usagef("--complete is empty; name the plan to complete")
	}
	if err := atMost(c, maxThreads, "threads"); err != nil {
		return err
	}
	output := path
	if c.IsSet("output") {
		output = c.String("output")
	}
	plan, err := readPlan(path)
	if err != nil {
		return err
	}
	if err := notInput(output, plan.Files()...); err != nil {
		return err
	}
	if err := oneFile(output, planKind); err != nil {
		return err
	}
	job := launchers.JobIn(os.Getenv)
	if job.Rank > 0 {
		c.App.Writer, c.App.ErrWriter = io.Discard, io.Discard // only the first rank prints
	}
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	began := time.Now()
	waiting := map[string]bool{}
	first := int64(-1) // bytes that were complete at the start
	done, err := blend.Complete(c.Context, path, output, blend.CompleteOptions{Sums: c.String("sums"),
		Threads: rankThreads(c, job), Together: job.Size > 1, FS: fileSystem(c),
		Progress: func(u blend.CompleteProgress) {
			if u.Waiting != "" && !waiting[u.Waiting] {
				waiting[u.Waiting] = true
				p.line("waiting for %s, which reads %s; this process continues the work if the other is silent for a "+
					"minute", u.Waiting, u.Path)
			}
			if u.Read == 0 {
				first = u.Bytes
			}
			rate := float64(u.Bytes-first) / max(time.Since(began).Seconds(), 1e-3)
			p.update(fmt.Sprintf("%s of %s, %s/s, %d of %d shards complete", quantity.Bytes(u.Bytes),
				quantity.Bytes(u.Total), quantity.Bytes(int64(rate)), u.Shards, u.OfShards),
				float64(u.Bytes), float64(u.Total))
		}})
	if other := new(cache.FailedError); job.Rank > 0 && errors.As(err, &other) {
		return exitCode(exitFailed) // the other process has printed the error
	}
	if err != nil {
		return err
	}
	p.end()
	if c.Bool("json") {
		return printJSON(c.App.Writer, map[string]any{"plan": output, "fingerprint": done.Plan.Fingerprint(),
			"provisional_fingerprint": done.Plan.ProvisionalFingerprint(), "shards": done.Shards, "bytes": done.Bytes,
			"seconds": time.Since(began).Seconds()})
	}
	w, name := c.App.Writer, printable(filepath.ToSlash(output))
	if output == path && !plan.Provisional() {
		fmt.Fprintf(w, "%s is already complete\n", name)
	} else {
		fmt.Fprintf(w, "%s read by this process, %s in %.1f s; %s is complete\n", quantity.Plural(int64(done.Shards),
			"shard"), quantity.Bytes(done.Bytes), time.Since(began).Seconds(), name)
	}
	fmt.Fprintf(w, "%s: plan %s\n", name, done.Plan.Fingerprint())
	if provisional := done.Plan.ProvisionalFingerprint(); provisional != "" {
		fmt.Fprintf(w, "it was the provisional plan %s\n", provisional)
	}
	return nil
}
