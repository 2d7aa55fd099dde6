package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"mula/blend"
	"mula/index/olmo"
	"mula/index/rebuild"
	"mula/internal/filesystem"
	"mula/internal/objects"
	"mula/internal/quantity"
	"mula/shards"
)

// An olmoIndex is a file of OLMo-core with the order of an epoch.
type olmoIndex struct {
	dataset olmo.Dataset
	order   olmo.Order
	entries int64
	fill    func(ctx context.Context, first int64, ids []uint32) error // nil for OLMo-core's own order
	note    string
}

func runIndexOLMo(c *cli.Context) error {
	var x *olmoIndex
	var err error
	switch {
	case c.IsSet("plan") == c.IsSet("paths"):
		return usagef("no order; use --plan for the order of a plan, or --paths for OLMo-core's own order of " +
			"token files")
	case c.Int64("seed") < 0 || c.Int64("epoch") < 1:
		return usagef("--seed must be 0 or more, and --epoch at least 1: OLMo-core counts epochs from 1")
	case c.IsSet("plan"):
		x, err = olmoPlan(c)
	default:
		x, err = olmoPaths(c)
	}
	if err != nil {
		return err
	}
	if err := x.order.Check(); err != nil {
		return err
	}
	fingerprint, err := olmoFingerprint(c, &x.dataset)
	if err != nil {
		return err
	}
	w := c.App.Writer
	dir := c.String("cache")
	if !c.Bool("dry-run") && dir == "" {
		return usagef("--cache is required: the work_dir of OLMo-core")
	}
	path := objects.Join(dir, x.order.Name())
	var fsys filesystem.FS
	if !c.Bool("dry-run") {
		if fsys, err = cacheFS(c); err != nil {
			return err
		}
	}
	took, kept := time.Duration(0), false
	if !c.Bool("dry-run") && c.Bool("resume") {
		if kept, err = x.present(c.Context, fsys, path, threads(c)); errors.Is(err, syscall.ENOTDIR) {
			return usagef("--cache %s is a file; name a folder", dir)
		} else if err != nil {
			return fmt.Errorf("%w; the file has another order of the same name: --resume=false replaces it, another "+
				"--cache keeps both", err)
		}
	}
	if !c.Bool("dry-run") && !kept {
		if !objects.IsURL(dir) {
			if err := os.MkdirAll(dir, 0o755); err != nil {
				return fmt.Errorf("creating the folder of the order: %w", err)
			}
		}
		began := time.Now()
		if x.fill != nil {
			path, err = x.order.WriteFunc(c.Context, fsys, dir, threads(c), x.entries, x.fill)
		} else {
			path, err = x.order.Write(c.Context, fsys, dir, threads(c))
		}
		if err != nil {
			return err
		}
		took = time.Since(began)
	}
	if c.Bool("json") {
		var files []string
		for _, f := range x.dataset.Files {
			files = append(files, f.Path)
		}
		return printJSON(w, map[string]any{"file": path, "bytes": 4 * x.entries, "instances": x.order.Instances,
			"entries": x.entries, "seconds": took.Seconds(),
			"paths": files, "dtype": x.dataset.DType, "sequence_length": x.dataset.SequenceLength, "note": x.note,
			"dataset_fingerprint": fingerprint, "written": !c.Bool("dry-run") && !kept})
	}
	fmt.Fprintf(w, "%s: an order of %s of %s, %s\n", printable(path), quantity.Plural(x.entries, "sample"),
		quantity.Plural(x.order.Instances, "instance"), quantity.Bytes(4*x.entries))
	if x.note != "" {
		fmt.Fprintf(w, "note: %s\n", x.note)
	}
	if fingerprint != "" {
		fmt.Fprintf(w, "dataset_fingerprint (v2.0): %s\n", fingerprint)
	}
	if kept {
		fmt.Fprintln(w, "The file was already complete.")
	}
	if c.Bool("dry-run") {
		fmt.Fprintln(w, "Nothing was written (--dry-run).")
	}
	if x.fill != nil {
		fmt.Fprintf(w, "OLMo-core uses it with seed %d, sequence_length %d, dtype %s and these paths, in this "+
			"sequence (--json lists them all):\n", x.order.Seed,
			x.dataset.SequenceLength, x.dataset.DType)
		for i, f := range x.dataset.Files {
			if i == 8 && len(x.dataset.Files) > 9 {
				fmt.Fprintf(w, "  … and %d more\n", len(x.dataset.Files)-i)
				break
			}
			fmt.Fprintf(w, "  %s\n", printable(f.Path))
		}
	}
	return nil
}

// present reports whether the file at path has the order. A file with another order is an error:
// its name does not show whether the order is OLMo-core's own or a plan's, and a training that
// resumes with the other order would silently repeat and omit data.
func (x *olmoIndex) present(ctx context.Context, fsys filesystem.FS, path string, threads int) (bool, error) {
	var err error
	if x.fill != nil {
		err = olmo.VerifyFunc(ctx, fsys, path, x.entries, x.fill)
	} else {
		err = x.order.Verify(ctx, fsys, path, threads)
	}
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return err == nil, err
}

// olmoFingerprint returns OLMo-core's fingerprint of the data set, which its checkpoints have, or
// "" without --vocab-size.
func olmoFingerprint(c *cli.Context, d *olmo.Dataset) (string, error) {
	given := 0
	for _, name := range []string{"vocab-size", "eos-token-id", "pad-token-id"} {
		if c.IsSet(name) {
			given++
		}
	}
	switch {
	case given == 0 && !c.IsSet("bos-token-id"):
		return "", nil
	case given < 3:
		return "", usagef("the fingerprint of the data set needs --vocab-size, --eos-token-id and --pad-token-id, " +
			"and --bos-token-id if there is one")
	}
	v := olmo.Vocabulary{Size: c.Int64("vocab-size"), EOS: c.Int64("eos-token-id"), Pad: c.Int64("pad-token-id")}
	if c.IsSet("bos-token-id") {
		bos := c.Int64("bos-token-id")
		v.BOS = &bos
	}
	return d.Fingerprint(v), nil
}

// olmoPlan returns the order of the plan that the flags name.
func olmoPlan(c *cli.Context) (*olmoIndex, error) {
	for _, name := range []string{"dtype", "seq-length", "max-target-sequence-length", "source-permutation-seed"} {
		if c.IsSet(name) {
			return nil, usagef("--%s is in the plan; remove it", name)
		}
	}
	return planOrder(c.String("plan"), c.Int64("seed"), c.Int64("epoch"), c.Int64("global-batch-size"))
}

// planOrder returns the part of a plan's order for an epoch of OLMo-core. batch is OLMo-core's
// global batch in samples, 0 if unknown.
func planOrder(path string, seed, epoch, batch int64) (*olmoIndex, error) {
	plan, err := blend.ReadPlan(path)
	if err != nil {
		return nil, err
	}
	o, err := blend.NewOLMoOrder(plan)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	x := &olmoIndex{dataset: o.Dataset, order: o.Dataset.Order(seed, epoch)}
	// OLMo-core ends an epoch after the last complete batch of instances and drops the rest.
	perEpoch := x.order.Instances
	if batch > 0 {
		perEpoch -= perEpoch % batch
	}
	switch {
	case batch < 0:
		return nil, usagef("--global-batch-size is %d; it must be at least 1", batch)
	case perEpoch == 0:
		return nil, usagef("--global-batch-size is %d, more than the %s of the shards", batch,
			quantity.Plural(x.order.Instances, "instance"))
	case batch == 0 && (plan.Length() > x.order.Instances || x.order.Epoch > 1):
		return nil, usagef("the plan has %s, but an epoch of OLMo-core has at most %s; set --global-batch-size, in "+
			"samples, so that no position is lost between epochs, and --epoch 1, 2, …",
			quantity.Plural(plan.Length(), "position"), quantity.Grouped(x.order.Instances))
	}
	first := (x.order.Epoch - 1) * perEpoch
	if first >= plan.Length() {
		return nil, usagef("--epoch %d starts at position %s, after the end of the plan", x.order.Epoch,
			quantity.Grouped(first))
	}
	x.entries = min(perEpoch, plan.Length()-first)
	if left := plan.Length() - first - x.entries; left > 0 {
		x.note = fmt.Sprintf("the plan continues with epoch %d (%s remain); write it with --epoch %d", x.order.Epoch+1,
			quantity.Plural(left, "position"), x.order.Epoch+1)
	} else if x.entries < perEpoch {
		x.note = fmt.Sprintf("the plan ends %s before OLMo-core's epoch; end the training there "+
			"(max_duration), because OLMo-core cannot read further", quantity.Plural(perEpoch-x.entries, "sample"))
	}
	x.fill = func(ctx context.Context, at int64, ids []uint32) error { return o.Fill(ctx, first+at, ids) }
	return x, nil
}

// olmoPaths returns OLMo-core's own order of token files.
func olmoPaths(c *cli.Context) (*olmoIndex, error) {
	if c.Int64("seq-length") < 1 {
		return nil, usagef("--seq-length is required, and must be at least 1")
	}
	paths := c.StringSlice("paths")
	if c.IsSet("source-permutation-seed") {
		given := paths
		paths = nil
		for _, i := range olmo.Permute(c.Int64("source-permutation-seed"), len(given)) {
			paths = append(paths, given[i])
		}
	}
	files, err := olmo.Stat(c.Context, paths)
	if err != nil {
		return nil, err
	}
	d := olmo.Dataset{Files: files, DType: shards.DType(c.String("dtype")), SequenceLength: c.Int64("seq-length"),
		MaxTargetSequenceLength: c.Int64("max-target-sequence-length")}
	if err := d.Check(); err != nil {
		return nil, err
	}
	order := d.Order(c.Int64("seed"), c.Int64("epoch"))
	return &olmoIndex{dataset: d, order: order, entries: order.Entries()}, nil
}

// verifyOLMo compares the orders in a folder with OLMo-core's own orders, or with the order of
// --plan.
func verifyOLMo(c *cli.Context, dir string, o rebuild.VerifyOptions) (rebuild.Report, error) {
	if !c.IsSet("plan") {
		return olmo.Verify(c.Context, dir, o, nil)
	}
	return olmo.Verify(c.Context, dir, o, func(named olmo.Order) (olmo.Planned, error) {
		x, err := planOrder(c.String("plan"), named.Seed, named.Epoch, c.Int64("global-batch-size"))
		if err != nil {
			return olmo.Planned{}, err
		}
		return olmo.Planned{Order: x.order, Entries: x.entries, Fill: x.fill}, nil
	})
}
