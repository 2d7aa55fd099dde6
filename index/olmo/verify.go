package olmo

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"mula/index/rebuild"
	"mula/internal/filesystem"
	"mula/internal/objects"
)

// IsName reports whether a file name is the name of an order of OLMo-core.
func IsName(name string) bool {
	return strings.HasPrefix(name, "global_indices_") && strings.HasSuffix(name, ".npy")
}

// Planned is the part of a plan's order for an epoch of OLMo-core.
type Planned struct {
	Order   Order // as OLMo-core names it
	Entries int64
	Fill    func(ctx context.Context, first int64, ids []uint32) error // as for [Order.WriteFunc]
}

// Verify compares the orders in a directory with OLMo-core's own orders. If planned is not nil, it
// compares them with the order of a plan: planned returns its part for the seed and epoch of a
// file.
func Verify(ctx context.Context, dir string, o rebuild.VerifyOptions, planned func(Order) (Planned, error)) (
	rebuild.Report, error) {
	var r rebuild.Report
	entries, err := filesystem.Default(o.FS).ReadDir(dir)
	if err != nil {
		return r, fmt.Errorf("verifying index files: %w", err)
	}
	writer, hint := "OLMo-core", "; if it was written for a plan, name the plan with --plan"
	if planned != nil {
		writer, hint = "`mula index --plan`", ""
	}
	equal := false
	for _, e := range entries {
		if !IsName(e.Name()) {
			continue
		}
		path := objects.Join(dir, e.Name())
		v := rebuild.Verdict{Description: e.Name(), Kind: "global indices", Prefixes: []string{"epoch order"}}
		order, err := parseName(path)
		if err != nil {
			v.Problem = err.Error()
			r.Verdicts = append(r.Verdicts, v)
			continue
		}
		if o.Progress != nil {
			o.Progress(len(r.Verdicts), len(entries), v.Description)
		}
		if planned == nil {
			err = order.Verify(ctx, o.FS, path, o.Threads)
		} else if p, failed := planned(order); failed != nil {
			return r, failed
		} else if p.Order != order {
			err = fmt.Errorf("the file of the plan's order must have the name %s", p.Order.Name())
		} else {
			err = VerifyFunc(ctx, o.FS, path, p.Entries, p.Fill)
		}
		if ctx.Err() != nil {
			return r, ctx.Err()
		}
		if err == nil {
			v.Equal, equal = true, true
		} else {
			v.Differs, v.Problem = errors.As(err, new(*difference)), err.Error()+hint
		}
		r.Verdicts = append(r.Verdicts, v)
	}
	if equal {
		r.Writers = []string{writer}
	}
	return r, nil
}
