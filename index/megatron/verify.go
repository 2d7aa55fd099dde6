package megatron

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"mula/index/gpt"
	"mula/index/numpy"
	"mula/index/rebuild"
	"mula/internal/filesystem"
	"mula/internal/mapping"
	"mula/internal/quantity"
)

// A unit is the result for one dataset or blend.
type unit struct {
	rebuild.Verdict
	match    bool      // the files are equal to the result of a candidate
	profiles []Profile // that write these names and bytes
}

// Verify recomputes the files that the descriptions in a directory specify, and compares them with
// the existing files, which Megatron or mula may have written. Verify tries all values of settings
// that are not in the descriptions: the extra token, the partial validation sample, the release,
// the arithmetic of blends. It writes nothing. The error concerns the directory or ctx; faults of
// the cache are in the report.
func Verify(ctx context.Context, dir string, o rebuild.VerifyOptions) (rebuild.Report, error) {
	fsys := filesystem.Default(o.FS)
	entries, err := fsys.ReadDir(dir)
	if err != nil {
		return rebuild.Report{}, fmt.Errorf("verifying index cache: %w", err)
	}
	var r rebuild.Report
	var units []*unit
	described := map[string]bool{}
	for _, e := range entries {
		if base, ok := strings.CutSuffix(e.Name(), descriptionEnd); ok && !strings.HasPrefix(e.Name(), ".") {
			units = append(units, &unit{Verdict: rebuild.Verdict{Description: e.Name(), Split: rebuild.Train.String()}})
			described[base] = true
		}
	}
	for _, e := range entries {
		for _, end := range append(gptEnds[:], blendEnds[:]...) {
			base, ok := strings.CutSuffix(e.Name(), "-"+end)
			if ok && !strings.HasPrefix(base, ".") && !described[base+"-"] {
				r.Notes = append(r.Notes, e.Name()+" has no description: Megatron-LM does not use it")
				break
			}
		}
	}
	v := &verifier{fsys: fsys, dir: dir, root: o.Root, described: described, workers: gpt.NewWorkers(o.Threads)}
	var mu sync.Mutex
	finished := 0
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(v.workers.Places())
	for _, u := range units {
		g.Go(func() error {
			if err := v.unit(ctx, u); err != nil {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				u.Problem = err.Error()
			}
			mu.Lock()
			defer mu.Unlock()
			finished++
			if o.Progress != nil {
				o.Progress(finished, len(units), u.Description)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return rebuild.Report{}, err
	}
	writers := Profiles()
	matches := 0
	for _, u := range units {
		r.Verdicts = append(r.Verdicts, u.Verdict)
		if u.match {
			matches++
			writers = slices.DeleteFunc(writers, func(p Profile) bool { return !slices.Contains(u.profiles, p) })
		}
	}
	for _, p := range writers {
		if matches > 0 {
			r.Writers = append(r.Writers, "Megatron core "+p.Releases())
		}
	}
	return r, nil
}

// verifier holds the state that the units of one Verify share.
type verifier struct {
	fsys      filesystem.FS
	dir, root string
	described map[string]bool // the descriptions in dir, without descriptionEnd
	workers   *gpt.Workers
}

// unit fills in the result of a unit.
func (v *verifier) unit(ctx context.Context, u *unit) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	d, bare, err := findDescription(v.fsys, v.dir, u.Description)
	if err != nil {
		return err
	}
	u.Kind, u.Split = d.class, d.split.String()
	if d.class == gptClass {
		u.Prefixes = []string{d.prefix}
		return v.dataset(ctx, u, d, bare)
	}
	// descriptions of datasets that are missing in the directory, where Megatron will look for them
	var missing []string
	for _, m := range d.members {
		u.Prefixes = append(u.Prefixes, m.prefix)
		base := Profile{bareNames: bare}.gptName(hashed(m.text), m.split)
		if name := base + descriptionEnd; !v.described[base] && !slices.Contains(missing, name) {
			missing = append(missing, name)
		}
	}
	err = v.blend(ctx, u, d, bare)
	if u.Equal && len(missing) > 0 {
		u.Equal, u.Differs = false, true
		u.Problem = fmt.Sprintf("datasets of the blend are missing: %s, the first is %s",
			quantity.Plural(int64(len(missing)), "description"), missing[0])
	}
	return err
}

// A candidate is a combination of settings that may have produced a unit.
type candidate struct {
	extra    bool // of a dataset: samples have the extra token
	settings []string
	profiles []Profile
	files    []wanted
	build    func(ctx context.Context, files []io.WriterAt) error
	headers  int // number of existing files with its sizes and headers
}

// wanted describes the expected contents of a file.
type wanted struct {
	name  string // suffix of the name
	descr string
	cols  int64 // numbers per row; 0: one-dimensional
	rows  int64
}

func (w wanted) header() [numpy.HeaderSize]byte {
	if w.cols == 0 {
		return numpy.Header(w.descr, w.rows)
	}
	return numpy.Header(w.descr, w.rows, w.cols)
}

func (w wanted) width() int64 { return int64(w.descr[2] - '0') }

func (w wanted) size() int64 { return numpy.HeaderSize + w.rows*max(1, w.cols)*w.width() }

// dataset compares a GPT dataset.
func (v *verifier) dataset(ctx context.Context, u *unit, d *description, bare bool) error {
	file, err := gpt.OpenPrefix(ctx, v.root, d.prefix)
	if err != nil {
		return err
	}
	defer file.Close()
	first, end, err := d.documents(file.Sequences())
	if err != nil {
		return err
	}
	if first < 0 || end > file.Sequences() || first > end {
		return fmt.Errorf("%s has %d sequences, but the description assigns %d to %d to the %s split", file.Path(),
			file.Sequences(), first, end, d.split)
	}
	var candidates []*candidate
	var failed error
	for _, extra := range []bool{true, false} {
		for _, partial := range []bool{false, true} {
			if bare && !extra || partial && (bare || d.split != rebuild.Valid) {
				continue
			}
			known := map[string]*candidate{} // by the type of the sample index
			for _, p := range d.profiles(bare) {
				g := gpt.Dataset{
					Lengths: file.Lengths(), Guard: file.Guard, First: first, End: end,
					SequenceLength: d.sequenceLength, ExtraToken: extra, KeepPartial: partial,
					// CheckOffsets is left to compare
					AllowEmpty: !bare, Samples: -1, Seed: d.seed, SampleType: p.sampleType,
				}
				if d.samples.Given {
					g.Samples = d.samples.N
				}
				l, err := g.Layout()
				if err != nil {
					failed = err
					continue
				}
				if known[l.SampleDescr] == nil {
					known[l.SampleDescr] = v.datasetCandidate(&g, l)
					candidates = append(candidates, known[l.SampleDescr])
				}
				known[l.SampleDescr].profiles = append(known[l.SampleDescr].profiles, p)
			}
		}
	}
	if len(candidates) == 0 {
		return failed
	}
	return v.compare(ctx, u, candidates)
}

func (v *verifier) datasetCandidate(g *gpt.Dataset, l gpt.Layout) *candidate {
	c := &candidate{
		extra: g.ExtraToken,
		files: []wanted{
			{gptEnds[0], "<i4", 0, l.DocumentEntries},
			{gptEnds[1], l.SampleDescr, 2, l.Samples + 1},
			{gptEnds[2], l.ShuffleDescr, 0, l.Samples},
		},
		build: func(ctx context.Context, files []io.WriterAt) error { return v.workers.Build(ctx, g, l, files) },
	}
	if !g.ExtraToken {
		c.settings = append(c.settings, "no extra token")
	}
	if g.KeepPartial {
		c.settings = append(c.settings, "partial sample kept")
	}
	return c
}

// blend compares a blend.
func (v *verifier) blend(ctx context.Context, u *unit, d *description, bare bool) error {
	b := &blend{split: d.split, weights: d.weights, counts: d.counts, size: d.size}
	for _, m := range d.members {
		b.members = append(b.members, &dataset{split: m.split, prefix: m.prefix})
	}
	n := b.length()
	var candidates []*candidate
	for _, a := range []Arithmetic{Separate, Fused} {
		candidates = append(candidates, &candidate{
			settings: []string{a.String()}, profiles: d.profiles(bare),
			files: []wanted{{blendEnds[0], "<i2", 0, n}, {blendEnds[1], "<i8", 0, n}},
			build: func(ctx context.Context, files []io.WriterAt) error {
				_, err := buildBlend(ctx, v.workers, b, a, files)
				return err
			},
		})
	}
	return v.compare(ctx, u, candidates)
}

// compare finds the candidate that produced the files. If there is none, it reports the first byte
// of each file that differs from the best match.
func (v *verifier) compare(ctx context.Context, u *unit, candidates []*candidate) error {
	var names []string
	for _, w := range candidates[0].files {
		names = append(names, strings.TrimSuffix(u.Description, descriptionEnd)+w.name)
	}
	files, err := rebuild.OpenFiles(v.fsys, v.dir, names)
	if err != nil {
		return err
	}
	defer files.Close()
	unknown := *u
	err = mapping.Guard(func() error { return match(ctx, u, candidates, files) })
	if err == nil {
		err = files.Cut()
	}
	if err != nil {
		*u = unknown
	}
	return err
}

// match is compare with open files. The caller must use [mapping.Guard].
func match(ctx context.Context, u *unit, candidates []*candidate, files rebuild.Files) error {
	heads := make([][]byte, len(files))
	for i := range files {
		var err error
		if heads[i], err = files[i].Range(0, numpy.HeaderSize); err != nil {
			return err
		}
	}
	for _, c := range candidates {
		for i, w := range c.files {
			header := w.header()
			if !files[i].Missing && files[i].Size == w.size() && bytes.Equal(heads[i], header[:]) {
				c.headers++
			}
		}
	}
	// Candidates whose headers match the files are first; only they can be right.
	slices.SortStableFunc(candidates, func(a, b *candidate) int { return b.headers - a.headers })
	for _, c := range candidates {
		if c.headers < len(files) {
			break
		}
		comparers, err := c.compare(ctx, files, rebuild.Any)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, mapping.ErrUnreadable) {
			return err
		}
		if err != nil {
			// without a result, Megatron cannot have produced the files with this candidate
			continue
		}
		if !slices.ContainsFunc(comparers, func(c *rebuild.Comparer) bool { _, differs := c.First(); return differs }) {
			return u.equal(c, candidates, files)
		}
	}
	var closest *candidate
	var best []*rebuild.Comparer
	var failed error
	fewest := int64(-1)
	for _, c := range candidates {
		if c.headers < candidates[0].headers {
			break
		}
		comparers, err := c.compare(ctx, files, rebuild.Count)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if errors.Is(err, mapping.ErrUnreadable) {
			return err
		}
		if err != nil {
			failed = err
			continue
		}
		different := int64(0)
		for _, c := range comparers {
			different += c.Different()
		}
		if fewest < 0 || different < fewest {
			closest, best, fewest = c, comparers, different
		}
	}
	if best == nil {
		return failed
	}
	var problems []string
	for i, w := range closest.files {
		at, differs := best[i].First()
		switch {
		case files[i].Missing:
			problems = append(problems, files[i].Name+" is missing")
		case differs:
			meaning, err := w.meaning(&files[i], at, best[i])
			if err != nil {
				return err
			}
			problems = append(problems, fmt.Sprintf("%s differs first at byte %s: %s", files[i].Name,
				quantity.Grouped(at), meaning))
		}
	}
	u.Differs, u.Problem = true, strings.Join(problems, "; ")
	return nil
}

// equal fills in the result of files that are equal to the result of a candidate.
func (u *unit) equal(c *candidate, candidates []*candidate, files rebuild.Files) error {
	u.Equal, u.match, u.profiles = true, true, c.profiles
	settings := c.settings
	if u.Kind == gptClass {
		samples := c.files[1]
		backwards, err := endsBackwards(&files[1], samples)
		if err != nil {
			return err
		}
		if samples.descr == "<i4" && backwards {
			u.profiles = slices.DeleteFunc(slices.Clone(u.profiles), func(p Profile) bool { return p.checkOffsets })
		}
		// Without a sample that starts at the start of a document, the files are the same with and
		// without the extra token.
		if c.extra && len(settings) == 0 && slices.ContainsFunc(candidates, func(other *candidate) bool {
			return !other.extra && slices.Equal(other.files, c.files)
		}) {
			begins, err := beginsWithDocument(&files[1], samples)
			if err != nil {
				return err
			}
			if !begins {
				settings = []string{"extra token or not"}
			}
		}
	}
	u.Settings = strings.Join(settings, ", ")
	return nil
}

// compare builds a candidate and compares it with the files. If the candidate is not plausible,
// only the headers and the sizes are compared.
func (c *candidate) compare(ctx context.Context, files rebuild.Files, search rebuild.Search) (
	[]*rebuild.Comparer, error) {
	var sizes []int64
	var rows []int
	var total int64
	plausible := true
	for _, w := range c.files {
		sizes = append(sizes, w.size())
		rows = append(rows, int(w.width()*max(1, w.cols)))
		total += w.size()
		plausible = plausible && w.rows <= 1<<50 // their size is below 2^63
	}
	plausible = plausible && files.Plausible(total)
	return files.Compare(search, sizes, rows, func(to []io.WriterAt) error {
		if plausible {
			return c.build(ctx, to)
		}
		for i, w := range c.files {
			if to[i] == nil {
				continue
			}
			header := w.header()
			if _, err := to[i].WriteAt(header[:], 0); err != nil {
				return err
			}
			end := files[i].Size // missing bytes start there
			if _, err := to[i].WriteAt([]byte{0}, end); err != nil {
				return err
			}
		}
		return nil
	})
}

// beginsWithDocument reports whether a sample other than the first starts with the first token of a
// document, in a sample index with an extra token.
func beginsWithDocument(f *rebuild.File, w wanted) (bool, error) {
	const most = 1 << 16 // rows that are read at a time
	for first := int64(1); first < w.rows; first += most {
		n := min(most, w.rows-first)
		rows, err := w.read(f, first, n)
		if err != nil {
			return false, err
		}
		for k := range n {
			if rows.at(2*k+1) == 0 {
				return true, nil
			}
		}
	}
	return false, nil
}

// endsBackwards reports whether a sample index ends with offset -1, which newer releases reject.
func endsBackwards(f *rebuild.File, w wanted) (bool, error) {
	last, err := w.read(f, w.rows-1, 1)
	if err != nil {
		return false, err
	}
	return last.at(1) < 0, nil
}

// read returns n rows of a sample index from the given row.
func (w wanted) read(f *rebuild.File, row, n int64) (column, error) {
	size := w.width() * w.cols
	data, err := f.Range(numpy.HeaderSize+row*size, n*size)
	return column{data: data, width: int(w.width())}, err
}

// longestHeader is at least the size of a header that [numpy.ReadHeader] accepts.
const longestHeader = 1 << 17

// meaning describes the first differing byte, which is at the given offset.
func (w wanted) meaning(f *rebuild.File, at int64, c *rebuild.Comparer) (string, error) {
	name := strings.TrimSuffix(w.name, ".npy")
	switch {
	case at >= w.size():
		return fmt.Sprintf("%s: %d bytes after its end", name, f.Size-w.size()), nil
	case at < numpy.HeaderSize:
		head, err := f.Range(0, longestHeader)
		if err != nil {
			return "", err
		}
		want := fmt.Sprintf("%s of shape %s", w.descr, shape(w.rows, w.cols))
		got, err := numpy.ReadHeader(bytes.NewReader(head), f.Size)
		if err != nil {
			return fmt.Sprintf("%s header: not readable (%v), should be %s", name, err, want), nil
		}
		return fmt.Sprintf("%s header: %s of shape %s, should be %s", name, got.Descr, shape(got.Shape...), want), nil
	case at >= f.Size:
		return fmt.Sprintf("%s: truncated after %d of %d bytes", name, f.Size, w.size()), nil
	}
	width := w.width()
	number := (at - numpy.HeaderSize) / width
	place := fmt.Sprintf("entry %d", number)
	if w.cols > 0 {
		place = fmt.Sprintf("row %d, %s", number/w.cols, [...]string{"document", "offset"}[number%w.cols])
	}
	begin := numpy.HeaderSize + number*width
	if begin+width > f.Size {
		return fmt.Sprintf("%s %s: truncated", name, place), nil
	}
	got, err := f.Range(begin, width)
	if err != nil {
		return "", err
	}
	row, rowAt := c.Want()
	return fmt.Sprintf("%s %s: %s, should be %s", name, place, w.number(got), w.number(row[begin-rowAt:])), nil
}

// number formats one number of the file's type.
func (w wanted) number(p []byte) string {
	switch w.descr {
	case "<i2":
		return fmt.Sprint(int16(binary.LittleEndian.Uint16(p)))
	case "<u4":
		return fmt.Sprint(binary.LittleEndian.Uint32(p))
	case "<i4":
		return fmt.Sprint(int32(binary.LittleEndian.Uint32(p)))
	}
	return fmt.Sprint(int64(binary.LittleEndian.Uint64(p)))
}

// shape formats a shape like Python.
func shape(n ...int64) string {
	if len(n) == 2 && n[1] != 0 {
		return fmt.Sprintf("(%d, %d)", n[0], n[1])
	}
	if len(n) > 0 {
		return fmt.Sprintf("(%d,)", n[0])
	}
	return "()"
}
