package megatron

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"golang.org/x/sync/errgroup"

	"mula/index/cache"
	"mula/index/gpt"
	"mula/index/numpy"
	"mula/internal/mapping"
)

// VerifyOptions are the options of [Verify].
type VerifyOptions struct {
	// the base directory of relative prefixes; "" is the working directory
	Root    string
	Threads int // number of goroutines that compute; at least 1
	// receives every unit, if not nil; calls do not overlap
	Progress func(finished, all int, u UnitReport)
}

// A Report compares a cache directory with its descriptions.
type Report struct {
	Units   []UnitReport // one for each description, sorted by name
	Orphans []string     // index files without a description: Megatron does not use them
}

// A UnitReport is the result for one dataset or blend.
type UnitReport struct {
	Description string // the file name
	Class       string // "GPTDataset", "BlendedDataset" or "" if it could not be read
	Split       Split
	Prefixes    []string // of the token files

	// Problem is the reason why the unit could not be computed. If set, the fields below are not.
	Problem error

	OK    bool
	Files []FileReport

	// The settings that produced the files, if OK; otherwise the settings with the best match.
	ExtraToken bool // of a dataset
	// of a dataset: the files are the same with and without the extra token, because no sample
	// starts at the start of a document
	EitherToken bool
	KeepPartial bool       // of a dataset of the validation split
	Arithmetic  Arithmetic // of a blend
	Profiles    []Profile  // all profiles that write these names and bytes

	// Absent lists the descriptions of a blend's datasets that are missing in the directory, where
	// Megatron will look for them.
	Absent []string
}

// A FileReport is the result for one file.
type FileReport struct {
	Name    string
	Missing bool
	Size    int64 // of the file
	Want    int64 // the expected size

	// The first byte that differs, or -1, and its meaning: "sample_index row 17, offset: 12, should
	// be 13".
	Byte    int64
	Meaning string
}

// OK reports whether the file is correct.
func (f FileReport) OK() bool { return !f.Missing && f.Byte < 0 }

// Profiles returns the profiles that could have produced all correct units.
func (r Report) Profiles() []Profile {
	found := Profiles()
	for _, u := range r.Units {
		if u.OK {
			found = slices.DeleteFunc(found, func(p Profile) bool { return !slices.Contains(u.Profiles, p) })
		}
	}
	return found
}

// Verify recomputes the files that the descriptions in a directory specify, and compares them with
// the existing files, which Megatron or mula may have written. Verify tries all values of settings
// that are not in the descriptions: the extra token, the partial validation sample, the release,
// the arithmetic of blends. It writes nothing. The error concerns the directory or ctx; faults of
// the cache are in the report.
func Verify(ctx context.Context, dir string, o VerifyOptions) (Report, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return Report{}, fmt.Errorf("verifying index cache: %w", err)
	}
	var r Report
	described := map[string]bool{}
	for _, e := range entries {
		if base, ok := strings.CutSuffix(e.Name(), descriptionEnd); ok && !strings.HasPrefix(e.Name(), ".") {
			r.Units = append(r.Units, UnitReport{Description: e.Name()})
			described[base] = true
		}
	}
	for _, e := range entries {
		for _, end := range append(gptEnds[:], blendEnds[:]...) {
			base, ok := strings.CutSuffix(e.Name(), "-"+end)
			if ok && !strings.HasPrefix(base, ".") && !described[base+"-"] {
				r.Orphans = append(r.Orphans, e.Name())
				break
			}
		}
	}
	v := &verifier{dir: dir, root: o.Root, workshop: gpt.NewWorkshop(o.Threads)}
	var mu sync.Mutex
	finished := 0
	g, ctx := errgroup.WithContext(ctx)
	g.SetLimit(v.workshop.Places())
	for i := range r.Units {
		g.Go(func() error {
			u := &r.Units[i]
			if err := v.unit(ctx, u); err != nil {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				u.Problem = err
			}
			mu.Lock()
			defer mu.Unlock()
			finished++
			if o.Progress != nil {
				o.Progress(finished, len(r.Units), *u)
			}
			return nil
		})
	}
	return r, g.Wait()
}

// verifier holds the state that the units of one Verify share.
type verifier struct {
	dir, root string
	workshop  *gpt.Workshop
}

// unit fills in a report.
func (v *verifier) unit(ctx context.Context, u *UnitReport) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	path := filepath.Join(v.dir, u.Description)
	d, bare, err := findDescription(v.dir, u.Description)
	if err != nil {
		return err
	}
	u.Class, u.Split = d.class, d.split
	base := strings.TrimSuffix(path, descriptionEnd)
	if d.class == gptClass {
		u.Prefixes = []string{d.prefix}
		return v.dataset(ctx, u, d, base, bare)
	}
	seen := map[string]bool{}
	for _, m := range d.members {
		u.Prefixes = append(u.Prefixes, m.prefix)
		name := Profile{bareNames: bare}.gptName(hashed(m.text), m.split) + descriptionEnd
		if _, err := os.Stat(filepath.Join(v.dir, name)); err != nil && !seen[name] {
			u.Absent = append(u.Absent, name)
			seen[name] = true
		}
	}
	return v.blend(ctx, u, d, base, bare)
}

// A candidate is a combination of settings that may have produced a unit.
type candidate struct {
	extra bool
	files []wanted
	build func(ctx context.Context, files []io.WriterAt) error
	found func(u *UnitReport) // sets the settings in the report
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
func (v *verifier) dataset(ctx context.Context, u *UnitReport, d *description, base string, bare bool) error {
	file, err := openIndex(v.root, d.prefix)
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
	var candidates []candidate
	var failed error
	for _, extra := range []bool{true, false} {
		for _, partial := range []bool{false, true} {
			if bare && !extra || partial && (bare || d.split != Valid) {
				continue
			}
			known := map[string]bool{}
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
				if known[l.SampleDescr] {
					continue
				}
				known[l.SampleDescr] = true
				candidates = append(candidates, v.datasetCandidate(d, bare, &g, l))
			}
		}
	}
	if len(candidates) == 0 {
		return failed
	}
	return v.compare(ctx, u, base, candidates)
}

func (v *verifier) datasetCandidate(d *description, bare bool, g *gpt.Dataset, l gpt.Layout) candidate {
	return candidate{
		extra: g.ExtraToken,
		files: []wanted{
			{gptEnds[0], "<i4", 0, l.DocumentEntries},
			{gptEnds[1], l.SampleDescr, 2, l.Samples + 1},
			{gptEnds[2], l.ShuffleDescr, 0, l.Samples},
		},
		build: func(ctx context.Context, files []io.WriterAt) error {
			return v.workshop.Build(ctx, g, l, files)
		},
		found: func(u *UnitReport) {
			u.ExtraToken, u.KeepPartial = g.ExtraToken, g.KeepPartial
			for _, p := range d.profiles(bare) {
				h := *g
				h.SampleType = p.sampleType
				if other, err := h.Layout(); err == nil && other.SampleDescr == l.SampleDescr {
					u.Profiles = append(u.Profiles, p)
				}
			}
		},
	}
}

// blend compares a blend.
func (v *verifier) blend(ctx context.Context, u *UnitReport, d *description, base string, bare bool) error {
	b := &blend{split: d.split, weights: d.weights, counts: d.counts, size: d.size}
	for _, m := range d.members {
		b.members = append(b.members, &dataset{split: m.split, prefix: m.prefix})
	}
	n := b.length()
	var candidates []candidate
	for _, a := range []Arithmetic{Separate, Fused} {
		candidates = append(candidates, candidate{
			files: []wanted{{blendEnds[0], "<i2", 0, n}, {blendEnds[1], "<i8", 0, n}},
			build: func(ctx context.Context, files []io.WriterAt) error {
				_, err := buildBlend(ctx, v.workshop, b, a, files)
				return err
			},
			found: func(u *UnitReport) { u.Arithmetic, u.Profiles = a, d.profiles(bare) },
		})
	}
	return v.compare(ctx, u, base, candidates)
}

// compare finds the candidate that produced the files. If there is none, it reports the first byte
// of each file that differs from the best match.
func (v *verifier) compare(ctx context.Context, u *UnitReport, base string, candidates []candidate) error {
	unknown, files := *u, make([]*found, len(candidates[0].files))
	for i, w := range candidates[0].files {
		file, err := mapping.Open(base + w.name)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		defer file.Close()
		files[i] = &found{missing: err != nil, data: file.Data, cut: file.Cut}
	}
	err := mapping.Guard(func() error { return v.match(ctx, u, base, candidates, files) })
	for _, f := range files {
		if err == nil && !f.missing {
			err = f.cut() // the end of a truncated mapping may have been read as zeros
		}
	}
	if errors.Is(err, mapping.ErrUnreadable) {
		*u = unknown
	}
	return err
}

// match is compare with open files. The caller must use [mapping.Guard].
func (v *verifier) match(ctx context.Context, u *UnitReport, base string, candidates []candidate,
	files []*found) error {
	// Candidates whose headers match the files are first; only they can be right.
	likeness := func(c candidate) (alike int) {
		for i, w := range c.files {
			header := w.header()
			if !files[i].missing && int64(len(files[i].data)) == w.size() && bytes.HasPrefix(files[i].data, header[:]) {
				alike++
			}
		}
		return alike
	}
	slices.SortStableFunc(candidates, func(a, b candidate) int { return likeness(b) - likeness(a) })
	for _, c := range candidates {
		if likeness(c) < len(files) {
			break
		}
		comparers, err := v.run(ctx, c, files, true)
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
		if !slices.ContainsFunc(comparers, func(c *cache.Comparer) bool { _, differs := c.First(); return differs }) {
			u.OK = true
			u.report(base, c, files, comparers)
			if u.Class == gptClass && c.files[1].descr == "<i4" && endsBackwards(files[1].data, c.files[1]) {
				u.Profiles = slices.DeleteFunc(u.Profiles, func(p Profile) bool { return p.checkOffsets })
			}
			if u.Class == gptClass && u.ExtraToken && !u.KeepPartial {
				u.EitherToken = !beginsWithDocument(files[1].data, c.files[1]) &&
					slices.ContainsFunc(candidates, func(other candidate) bool {
						return !other.extra &&
							slices.Equal(other.files, c.files)
					})
			}
			return nil
		}
	}
	var closest candidate
	var best []*cache.Comparer
	var failed error
	fewest := int64(-1)
	for _, c := range candidates {
		if likeness(c) < likeness(candidates[0]) {
			break
		}
		comparers, err := v.run(ctx, c, files, false)
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
	u.report(base, closest, files, best)
	return nil
}

// beginsWithDocument reports whether a sample other than the first begins at the first token of a
// document, in a sample index with an extra token.
func beginsWithDocument(data []byte, w wanted) bool {
	rows := column{data: data[numpy.HeaderSize:], width: int(w.width())}
	for k := int64(1); k < w.rows; k++ {
		if rows.at(2*k+1) == 0 {
			return true
		}
	}
	return false
}

// endsBackwards reports whether a sample index ends with offset -1, which newer releases reject.
func endsBackwards(data []byte, w wanted) bool {
	rows := column{data: data[numpy.HeaderSize:], width: int(w.width())}
	return rows.at(2*w.rows-1) < 0
}

// found is a file of the directory.
type found struct {
	missing bool
	data    []byte       // mapped
	cut     func() error // [mapping.File.Cut]
}

// run builds a candidate and compares it with the files. With stop it ends at the first difference
// found, which need not be the first in a file.
func (v *verifier) run(ctx context.Context, c candidate, files []*found, stop bool) ([]*cache.Comparer, error) {
	comparers := make([]*cache.Comparer, len(files))
	to := make([]io.WriterAt, len(files))
	for i, f := range files {
		comparers[i] = &cache.Comparer{Data: f.data, Row: int(c.files[i].width() * max(1, c.files[i].cols)), Stop: stop,
			Count: !stop}
		if !f.missing {
			to[i] = comparers[i]
		}
	}
	if plausible(c, files) {
		if err := c.build(ctx, to); err != nil && !errors.Is(err, cache.ErrDiffers) {
			return nil, err
		}
	} else {
		for i, w := range c.files {
			if to[i] != nil {
				header := w.header()
				for _, part := range []struct {
					p  []byte
					at int64
					// missing bytes start there
				}{{header[:], 0}, {[]byte{0}, int64(len(files[i].data))}} {
					if _, err := to[i].WriteAt(part.p, part.at); err != nil && !errors.Is(err, cache.ErrDiffers) {
						return nil, err
					}
				}
			}
		}
	}
	for i, w := range c.files {
		comparers[i].End(w.size())
	}
	return comparers, nil
}

// plausible reports whether a candidate's files are about as large as the existing files. If they
// are far larger, the description does not belong to the files, and building could need more memory
// than the machine has. The headers then show the difference.
func plausible(c candidate, files []*found) bool {
	var want, have int64
	for i, w := range c.files {
		if w.rows > 1<<50 {
			return false
		}
		want += w.size()
		have += int64(len(files[i].data))
	}
	return want <= 1<<30+4*have
}

// report fills in the results of a candidate.
func (u *UnitReport) report(base string, c candidate, files []*found, comparers []*cache.Comparer) {
	c.found(u)
	for i, w := range c.files {
		f := FileReport{Name: filepath.Base(base) + w.name, Missing: files[i].missing, Size: int64(len(files[i].data)),
			Want: w.size(), Byte: -1}
		if f.Missing {
			f.Meaning = "the file is missing"
		} else if at, differs := comparers[i].First(); differs {
			f.Byte, f.Meaning = at, w.meaning(files[i].data, at, comparers[i])
		}
		u.Files = append(u.Files, f)
	}
}

// meaning describes the first differing byte, which is at the given offset.
func (w wanted) meaning(data []byte, at int64, c *cache.Comparer) string {
	name := strings.TrimSuffix(w.name, ".npy")
	switch {
	case at >= w.size():
		return fmt.Sprintf("%s: %d bytes after its end", name, int64(len(data))-w.size())
	case at < numpy.HeaderSize:
		want := fmt.Sprintf("%s of shape %s", w.descr, shape(w.rows, w.cols))
		got, err := numpy.ReadHeader(bytes.NewReader(data), int64(len(data)))
		if err != nil {
			return fmt.Sprintf("%s header: not readable (%v), should be %s", name, err, want)
		}
		return fmt.Sprintf("%s header: %s of shape %s, should be %s", name, got.Descr, shape(got.Shape...), want)
	case at >= int64(len(data)):
		return fmt.Sprintf("%s: truncated after %d of %d bytes", name, len(data), w.size())
	}
	width := w.width()
	number := (at - numpy.HeaderSize) / width
	place := fmt.Sprintf("entry %d", number)
	if w.cols > 0 {
		place = fmt.Sprintf("row %d, %s", number/w.cols, [...]string{"document", "offset"}[number%w.cols])
	}
	begin := numpy.HeaderSize + number*width
	if begin+width > int64(len(data)) {
		return fmt.Sprintf("%s %s: truncated", name, place)
	}
	row, rowAt := c.Want()
	return fmt.Sprintf("%s %s: %s, should be %s", name, place, w.number(data[begin:]), w.number(row[begin-rowAt:]))
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
