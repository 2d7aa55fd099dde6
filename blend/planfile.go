package blend

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path/filepath"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/objects"
)

// planFormat is the version of the layout of plan.json. sampledFormat is the version of plans with
// samples of shards, or with the places of their sums.
const (
	planFormat    = 1
	sampledFormat = 2
)

// maxPlanFile limits the size of a plan.json. A shard takes about 300 bytes.
const maxPlanFile = 512 << 20

// planFile is plan.json. P is the type of the meaning of a plan: a sealedPlan, or its replacement
// in plans of other orders.
type planFile[P any] struct {
	Format      int         `json:"format"`
	Fingerprint string      `json:"fingerprint"`
	Provisional string      `json:"provisional,omitempty"` // the fingerprint before the plan was completed
	Plan        P           `json:"plan"`
	Written     writtenPlan `json:"written"`
}

// writtenPlan is the rest of plan.json: values as the user wrote them, and the paths of the files.
type writtenPlan struct {
	Validation string          `json:"validation"`
	Sources    []writtenSource `json:"sources"`
	Stages     [][]string      `json:"stages"` // weights, by stage and source; empty with order megatron
	Cache      *writtenCache   `json:"cache,omitempty"`
	Packings   string          `json:"packings,omitempty"` // directory of the packing indexes, written like paths
}

type writtenCache struct {
	Directory string `json:"directory"` // of the index files, written like paths
	Root      string `json:"root"`      // directory for relative prefixes
}

type writtenSource struct {
	MaxEpochs string   `json:"max_epochs"`
	Paths     []string `json:"paths"` // with slashes; relative to the plan's directory if possible
	// directories of the packing indexes of an amended plan, by part of the source
	Packings []string `json:"packings,omitempty"`
	writtenSamples
}

// Fingerprint returns the SHA-256, in hexadecimal, of the plan's canonical form
// (docs/formats/plan.md). The paths of files and the spelling of weights are not part of it.
func (p *Plan) Fingerprint() string { return p.fingerprint }

// seal computes and sets the fingerprints.
func (p *Plan) seal() (err error) {
	if p.fingerprint, err = p.hash(); err != nil {
		return err
	}
	p.provisional, err = p.hashProvisional()
	return err
}

// hash returns the SHA-256 of the canonical form.
func (p *Plan) hash() (string, error) {
	text, err := p.canonical()
	if err != nil {
		return "", err
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:]), nil
}

func (p *Plan) canonical() ([]byte, error) { return encodeJSON(p.order.sealed(), "") }

// sealedSkips returns the skips, never nil.
func (p *Plan) sealedSkips() []Range {
	if p.Skips == nil {
		return []Range{}
	}
	return p.Skips
}

// encodeJSON returns the JSON text of v, without HTML escapes.
func encodeJSON(v any, indent string) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	e.SetIndent("", indent)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// Write writes the plan to a file or an object (a URL) atomically. Paths of shards are relative to
// the plan's directory, so that plan and shards can be moved together.
func (p *Plan) Write(path string) error { return p.WriteOn(nil, path) }

// WriteOn is [Plan.Write] on another file system; nil is the machine's.
func (p *Plan) WriteOn(fsys filesystem.FS, path string) error {
	dir, err := absolutePath(objects.Dir(path))
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	f := planFile[any]{Format: p.format(), Fingerprint: p.fingerprint, Plan: p.order.sealed(),
		Written: writtenPlan{Validation: p.HeldOut}}
	if !p.Provisional() {
		f.Provisional = p.provisional
	}
	relative := func(to string) (string, error) {
		absolute, err := absolutePath(to)
		if err != nil {
			return "", fmt.Errorf("writing %s: %w", path, err)
		}
		return filepath.ToSlash(relativePath(dir, absolute)), nil
	}
	for i, s := range p.Sources {
		w := writtenSource{MaxEpochs: s.MaxEpochs}
		for k := range s.Shards {
			way, err := relative(p.ShardPath(i, k))
			if err != nil {
				return err
			}
			w.Paths = append(w.Paths, way)
		}
		if w.writtenSamples, err = p.writeSamples(s.Shards, relative); err != nil {
			return err
		}
		f.Written.Sources = append(f.Written.Sources, w)
	}
	if err := p.order.writeFiles(&f.Written, relative); err != nil {
		return err
	}
	text, err := encodeJSON(f, " ")
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	if objects.IsURL(path) {
		return objects.WriteFile(context.Background(), path, append(text, '\n'))
	}
	return atomicfile.On(fsys).WriteFile(path, append(text, '\n'))
}

// path resolves a path of the plan file, which may be relative to the plan's directory.
func (p *Plan) path(written string) string {
	path := filepath.FromSlash(written)
	switch {
	case objects.IsURL(written):
		return written
	case filepath.IsAbs(path):
		return path
	case objects.IsURL(p.base):
		return objects.Join(p.base, written)
	}
	return filepath.Join(p.base, path)
}

// takeWritten sets the fields that do not change the plan's meaning.
func (p *Plan) takeWritten(w writtenPlan) error {
	if len(w.Sources) != len(p.Sources) || len(w.Stages) != len(p.Stages) {
		return fmt.Errorf("`plan` has %d sources and %d stages, but `written` has %d and %d", len(p.Sources),
			len(p.Stages), len(w.Sources), len(w.Stages))
	}
	p.HeldOut = w.Validation
	for i := range p.Sources {
		s := &p.Sources[i]
		s.MaxEpochs = w.Sources[i].MaxEpochs
		if err := placeShards(s.Name, s.Shards, w.Sources[i].Paths); err != nil {
			return err
		}
	}
	for j := range p.Stages {
		p.Stages[j].Written = w.Stages[j]
	}
	return nil
}

// placeShards sets the paths of shards.
func placeShards(source string, list []Shard, paths []string) error {
	if len(paths) != len(list) {
		return fmt.Errorf("source %q has %d shards and %d paths", source, len(list), len(paths))
	}
	for k := range list {
		list[k].Path = paths[k]
	}
	return nil
}
