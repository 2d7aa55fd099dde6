package megatron

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"mula/index/cache"
	"mula/index/gpt"
	"mula/index/greedy"
	"mula/index/numpy"
	"mula/index/rebuild"
)

// Build writes the files of all datasets and blends into the cache directory, the data of each
// before its description. If a blend would draw more samples from a dataset than it has, Build
// fails before the blend's files become visible. Without a cache directory, every token file has
// its own directory, and there are no blends.
func (x *Index) Build(ctx context.Context, o rebuild.BuildOptions) (cache.Summary, error) {
	w := gpt.NewWorkers(o.Threads)
	var units rebuild.Units
	if x.config.Cache != "" {
		for _, b := range x.blends {
			units.AddBlend(x.config.Cache, x.blendUnit(w, b))
		}
	}
	for _, d := range x.datasets {
		units.AddDataset(x.directory(d), x.datasetUnit(w, d, o.Together))
	}
	return units.Build(ctx, w, o)
}

// buildBlend writes the files of a blend, skipping nil files, and returns the number of samples of
// each dataset.
func buildBlend(ctx context.Context, w *gpt.Workers, b *blend, a Arithmetic, files []io.WriterAt) (counts []int64,
	err error) {
	n := b.length()
	which, sample := numpy.NewWriter[int16](files[0], n), numpy.NewWriter[int64](files[1], n)
	defer which.Release()
	defer sample.Release()
	emit := func(_ int64, dataset []int16, number []int64) error {
		return errors.Join(which.Append(dataset), sample.Append(number))
	}
	if b.size.Given {
		counts, err = greedy.Weighted(ctx, greedy.Rule{Weights: b.weights, Fused: a == Fused}, n, w.Pool, w.Threads(),
			emit)
	} else {
		counts, err = b.counts, greedy.Exhaustive(ctx, b.counts, a == Fused, w.Pool, w.Threads(), emit)
	}
	if err == nil {
		err = errors.Join(which.Flush(), sample.Flush())
	}
	return counts, err
}

// datasetSettings holds the settings that affect a dataset's contents but not its name.
type datasetSettings struct {
	ExtraToken  bool   `json:"extra_token"`
	KeepPartial bool   `json:"keep_partial"`
	SampleIndex string `json:"sample_index"` // its type: "auto", "int32" or "int64"
	gpt.Source
}

// blendSettings holds the settings that affect a blend's contents but not its name.
type blendSettings struct {
	Arithmetic string `json:"arithmetic"`
}

var sampleTypes = map[gpt.SampleType]string{gpt.Auto: "auto", gpt.Int32: "int32", gpt.Int64: "int64"}

// datasetUnit returns the unit of a dataset. With together, a large dataset is divided between
// processes.
func (x *Index) datasetUnit(w *gpt.Workers, d *dataset, together bool) cache.Unit {
	base := x.config.Profile.gptName(d.hash, d.split)
	u := cache.Unit{
		Name: d.title(), Marker: base + descriptionEnd, MarkerText: []byte(d.text),
		Settings: settings(datasetSettings{
			ExtraToken: d.gpt.ExtraToken, KeepPartial: d.gpt.KeepPartial, SampleIndex: sampleTypes[d.gpt.SampleType],
			Source: gpt.SourceOf(d.file),
		}),
		Expect: 4*(d.gpt.End-d.gpt.First) + 12*max(d.gpt.Samples, 0),
		Sizes: func(context.Context) ([]int64, error) {
			l, err := d.measured()
			return l.Sizes(), err
		},
		Build: func(ctx context.Context, files []io.WriterAt) error {
			l, err := d.measured()
			if err != nil {
				return err
			}
			defer d.file.Forget() // thousands of files are built one after the other
			if err := w.Build(ctx, &d.gpt, l, files); err != nil {
				return fmt.Errorf("%s, %s split: %w", d.file.Path(), d.split, err)
			}
			return nil
		},
	}
	if together {
		u.Parts = d.gpt.Parts()
	}
	for _, end := range gptEnds {
		u.Files = append(u.Files, base+end)
	}
	return u
}

func (x *Index) blendUnit(w *gpt.Workers, b *blend) cache.Unit {
	base := x.config.Profile.blendName(b.hash, b.split)
	sizes := b.sizes()
	u := cache.Unit{
		Name: b.title(), Marker: base + descriptionEnd, MarkerText: []byte(b.text),
		Settings: settings(blendSettings{Arithmetic: x.config.Arithmetic.String()}),
		Expect:   sizes[0] + sizes[1],
		Sizes:    func(context.Context) ([]int64, error) { return sizes, nil },
		Build: func(ctx context.Context, files []io.WriterAt) error {
			// The check is last, and its error keeps the files from being published.
			counts, err := buildBlend(ctx, w, b, x.config.Arithmetic, files)
			if err != nil {
				return err
			}
			return b.check(ctx, counts, x.config.Profile, w.Threads())
		},
	}
	for _, end := range blendEnds {
		u.Files = append(u.Files, base+end)
	}
	return u
}

// settings returns a struct of plain fields as JSON.
func settings(v any) json.RawMessage {
	text, _ := json.Marshal(v) // cannot fail: strings, numbers and booleans only
	return text
}

// check returns an error if a blend draws more samples from a dataset than it has. That is possible
// only if it draws more than the dataset was requested with.
func (b *blend) check(ctx context.Context, counts []int64, p Profile, threads int) error {
	var doubtful []*dataset
	for i, d := range b.members {
		if !d.samples.Given || counts[i] > d.samples.N {
			doubtful = append(doubtful, d)
		}
	}
	if err := measure(ctx, doubtful, threads); err != nil {
		return err
	}
	for i, d := range b.members {
		if d.samples.Given && counts[i] <= d.samples.N {
			continue
		}
		if l, err := d.measured(); err != nil || counts[i] <= l.Samples {
			continue
		}
		advice := "raise the surplus (--mid-level-dataset-surplus) by a factor of 2 to 10, here and in Megatron"
		if p.fixedSurplus || b.counts != nil {
			advice = "request a different number of samples, or remove the file"
		}
		return fmt.Errorf("%d samples are drawn from %s, which has only %d, and Megatron would stop with an "+
			"IndexError, at the latest at the first missing sample; %s",
			counts[i], d.prefix, d.layout.Samples, advice)
	}
	return nil
}
