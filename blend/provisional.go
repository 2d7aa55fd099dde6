package blend

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"mula/internal/objects"
	"mula/shards/facts"
	"mula/shards/sample"
)

// Provisional reports whether the plan has samples of some shards instead of the hashes of all
// their bytes. [Complete] reads the bytes and writes the complete plan, which has the same order.
func (p *Plan) Provisional() bool { return p.anyShard(func(sh *Shard) bool { return sh.Sample != "" }) }

// Has reports whether a fingerprint is the plan's fingerprint, or the fingerprint that it had
// before it was completed. Such plans have the same samples.
func (p *Plan) Has(fingerprint string) bool {
	return fingerprint == p.fingerprint || fingerprint != "" && fingerprint == p.provisional
}

// ProvisionalFingerprint returns the fingerprint that the plan has, or had, with samples of shards.
// It is "" if the plan never was provisional.
func (p *Plan) ProvisionalFingerprint() string { return p.provisional }

// anyShard reports whether a condition holds for any shard.
func (p *Plan) anyShard(holds func(sh *Shard) bool) bool {
	for i := range p.Sources {
		for k := range p.Sources[i].Shards {
			if holds(&p.Sources[i].Shards[k]) {
				return true
			}
		}
	}
	return false
}

// format returns the version of the layout of the plan's file.
func (p *Plan) format() int {
	if p.anyShard(func(sh *Shard) bool { return sh.Sample != "" || sh.sampled != "" || sh.sums != "" }) {
		return sampledFormat
	}
	return planFormat
}

// hashProvisional returns the fingerprint that the plan has, or had, with samples. It returns ""
// for a plan that never was provisional.
func (p *Plan) hashProvisional() (fingerprint string, err error) {
	if p.Provisional() {
		return p.fingerprint, nil
	}
	type hashes struct {
		to         *Shard
		bin, index string
	}
	var complete []hashes
	for i := range p.Sources {
		for k := range p.Sources[i].Shards {
			sh := &p.Sources[i].Shards[k]
			if sh.sampled == "" {
				continue
			}
			complete = append(complete, hashes{sh, sh.Bin, sh.Index})
			sh.Bin, sh.Sample = "", sh.sampled
			if !p.Traits().Padded {
				sh.Index = ""
			}
		}
	}
	if complete == nil {
		return "", nil
	}
	fingerprint, err = p.hash()
	for _, h := range complete {
		h.to.Bin, h.to.Index, h.to.Sample = h.bin, h.index, ""
	}
	return fingerprint, err
}

// sealed reports whether the shard has hashes of its content, complete or provisional.
func (sh *Shard) sealed() bool {
	if sh.Sample == "" {
		return isHex(sh.Bin, 64) && isHex(sh.Index, 64)
	}
	return isHex(sh.Sample, 64) && sh.Bin == "" && (sh.Index == "" || isHex(sh.Index, 64))
}

// same reports whether two plans have the same shard, at any place. One plan may have its sample
// and the other its hashes.
func (sh Shard) same(other Shard) bool {
	if sh.DType != other.DType || sh.Tokens != other.Tokens || sh.Documents != other.Documents {
		return false
	}
	if sh.Sample == "" && other.Sample == "" {
		return sh.Bin == other.Bin && sh.Index == other.Index
	}
	return cmp.Or(sh.Sample, sh.sampled) == cmp.Or(other.Sample, other.sampled)
}

// writtenSamples is the part of a source in plan.json that a plan with samples has, by shard. A
// list is empty if it would have only empty texts.
type writtenSamples struct {
	Samples []string `json:"samples,omitempty"` // of a complete plan that was provisional
	Blocks  []string `json:"blocks,omitempty"`  // of a provisional plan: names of the sampled blocks
	// prefixes of manifests and sums that are not beside the shards, written like paths
	Sums []string `json:"sums,omitempty"`
}

// writeSamples returns the samples of a source's shards for plan.json.
func (p *Plan) writeSamples(list []Shard, relative func(string) (string, error)) (w writtenSamples, err error) {
	set := func(to *[]string, k int, text string) {
		if text == "" {
			return
		}
		if *to == nil {
			*to = make([]string, len(list))
		}
		(*to)[k] = text
	}
	for k := range list {
		sh := &list[k]
		set(&w.Samples, k, sh.sampled)
		set(&w.Blocks, k, sh.blocks)
		if sh.sums != "" {
			way, err := relative(p.path(sh.sums))
			if err != nil {
				return w, err
			}
			set(&w.Sums, k, way)
		}
	}
	return w, nil
}

// takeSamples sets the fields of the shards that writeSamples writes.
func (p *Plan) takeSamples(sources []writtenSamples) error {
	if len(sources) != len(p.Sources) {
		return fmt.Errorf("`plan` has %d sources, but `written` has %d", len(p.Sources), len(sources))
	}
	for i := range p.Sources {
		s, w := &p.Sources[i], &sources[i]
		for _, list := range [][]string{w.Samples, w.Blocks, w.Sums} {
			if list != nil && len(list) != len(s.Shards) {
				return fmt.Errorf("source %q has %d shards, but %d samples, blocks or sums", s.Name, len(s.Shards),
					len(list))
			}
		}
		for k := range s.Shards {
			sh := &s.Shards[k]
			if w.Samples != nil {
				sh.sampled = w.Samples[k]
			}
			if w.Blocks != nil {
				sh.blocks = w.Blocks[k]
			}
			if w.Sums != nil {
				sh.sums = w.Sums[k]
			}
			if sh.sampled != "" && !isHex(sh.sampled, 64) || sh.Sample == "" && sh.blocks != "" ||
				!sample.Valid(sh.blocks) {
				return fmt.Errorf("source %q: shard %d has an invalid sample", s.Name, k+1)
			}
		}
	}
	if p.Provisional() && p.anyShard(func(sh *Shard) bool { return sh.sampled != "" }) {
		return errors.New("the plan has samples of completed shards, but other shards are not complete")
	}
	return nil
}

// sidecar returns the prefix of a shard's manifest and sums if they are in another folder, else "".
func (p *Plan) sidecar(source, shard int) string {
	if sums := p.Sources[source].Shards[shard].sums; sums != "" {
		return p.path(sums)
	}
	return ""
}

// sidecarIn returns the prefix of the manifest and the sums of a shard with this sample in a
// folder. The name does not depend on the place of the shard or on the plan.
func sidecarIn(folder, path, hash string) string {
	name := fmt.Sprintf("%s-%.16s", filepath.Base(path), hash)
	if objects.IsURL(folder) {
		return objects.Join(folder, name)
	}
	return filepath.Join(folder, name)
}

// readSample reads the sampled blocks of a shard and compares them with the sample that the plan
// has or had.
func (p *Plan) readSample(ctx context.Context, source, shard int) error {
	c, err := sample.Read(ctx, p.ShardPath(source, shard))
	if err != nil {
		return fmt.Errorf("source %q: %w", p.Sources[source].Name, err)
	}
	return p.compareSample(source, shard, c)
}

// compareSample compares the sampled blocks of a shard with the sample that the plan has or had.
func (p *Plan) compareSample(source, shard int, c *sample.Collector) error {
	want := &p.Sources[source].Shards[shard]
	if text := c.Differs(sample.Sample{Hash: cmp.Or(want.Sample, want.sampled), Blocks: want.blocks}); text != "" {
		return p.changed(source, shard, "%s", text)
	}
	return nil
}

// compareFacts compares the facts of a shard with the plan.
func (p *Plan) compareFacts(source, shard int, is facts.Facts) error {
	want := &p.Sources[source].Shards[shard]
	switch {
	case is.DType != want.DType:
		return p.changed(source, shard, "element type is %s, was %s", is.DType, want.DType)
	case is.Tokens != want.Tokens: // this also compares the size of .bin
		return p.changed(source, shard, "it has %d tokens, previously %d", is.Tokens, want.Tokens)
	case is.Documents != want.Documents:
		return p.changed(source, shard, "it has %d documents, previously %d", is.Documents, want.Documents)
	case is.Manifest && want.Bin != "" && is.Bin != want.Bin:
		return p.changed(source, shard, "SHA-256 of .bin in its manifest is %.16s…, was %.16s…", is.Bin, want.Bin)
	case is.Manifest && want.Index != "" && is.Index != want.Index:
		return p.changed(source, shard, "SHA-256 of .idx in its manifest is %.16s…, was %.16s…", is.Index, want.Index)
	}
	return nil
}
