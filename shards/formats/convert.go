package formats

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"mula/internal/atomicfile"
	"mula/shards"
	"mula/shards/layout"
)

// A Conversion reads shards of any layout and writes their documents, in order, to shards of one
// layout.
type Conversion struct {
	Inputs      []string // shards, as [Open] accepts them
	Hints       Hints    // for inputs without a manifest
	Layout      *layout.Layout
	Output      string  // prefix of the shard; with ShardTokens, shards are called PREFIX-00000, PREFIX-00001, …
	Options     Options // for [Create]
	ShardTokens int64   // maximum number of tokens of a shard with several documents; 0: one shard
	DropEmpty   bool    // skip documents without tokens

	// Progress, if not nil, is called from time to time with the numbers of documents and tokens
	// read so far.
	Progress func(documents, tokens int64)
}

// Converted is the result of a [Conversion].
type Converted struct {
	Documents int64          `json:"documents"` // written
	Tokens    int64          `json:"tokens"`
	Dropped   int64          `json:"dropped"` // skipped documents without tokens
	Shards    []WrittenShard `json:"shards"`
	Counts    string         `json:"counts,omitempty"` // fms: the file of counts that was updated
	// a shard numbered after the last one, which an earlier conversion to the same prefix has left
	Left string `json:"left,omitempty"`
}

// WrittenShard is a shard that a [Conversion] has written.
type WrittenShard struct {
	Prefix    string       `json:"prefix"`
	DType     shards.DType `json:"dtype"`
	Documents int64        `json:"documents"`
	Tokens    int64        `json:"tokens"`
	Bytes     int64        `json:"bytes"` // of all files except the manifest
}

// Run runs the conversion. Before it writes, it opens all inputs and compares their tokenizers. Of
// inputs with a manifest, it verifies the hashes of the files that locate documents ([Verify]). If
// it is not known whether all ids fit, it reads all ids first. Each shard appears complete or not
// at all. The same inputs and settings produce the same bytes.
func (c *Conversion) Run(ctx context.Context) (*Converted, error) {
	info, width, err := c.prepare(ctx)
	if err != nil {
		return nil, err
	}
	if c.Options.Width == 0 && info.VocabSize == 0 {
		c.Options.Width = width
	}
	// Remove the files of a killed conversion.
	if _, err := atomicfile.On(c.Options.FS).Clean(filepath.Dir(c.Output)); err != nil {
		return nil, err
	}
	out := &rolling{c: c, info: info, result: new(Converted)}
	defer out.abort()
	for _, input := range c.Inputs {
		if err := c.convert(ctx, input, out); err != nil {
			return nil, fmt.Errorf("converting %s: %w", input, err)
		}
	}
	if out.w == nil && len(out.result.Shards) == 0 { // no documents
		if err := out.begin(); err != nil {
			return nil, err
		}
	}
	if err := out.close(); err != nil {
		return nil, err
	}
	if c.ShardTokens > 0 {
		next := out.prefix(len(out.result.Shards))
		if _, _, err := Detect(next); err == nil {
			out.result.Left = next
		}
	}
	if c.Layout.Published != nil {
		if out.result.Counts, err = c.Layout.Published(ctx, c.Options.FS, c.Output); err != nil {
			return nil, err
		}
	}
	return out.result, nil
}

// prepare opens all inputs. It returns the tokenizer, which must be the same for all inputs, and
// the width in bytes that holds the ids of all inputs.
func (c *Conversion) prepare(ctx context.Context) (info shards.TokenizerInfo, width int, err error) {
	if len(c.Inputs) == 0 {
		return info, 0, errors.New("converting: no input")
	}
	if c.ShardTokens < 0 || c.Hints.VocabSize < 0 {
		return info, 0, errors.New("converting: a negative number of tokens or ids")
	}
	var scan []string // inputs whose ids must be read to know whether they fit
	for i, input := range c.Inputs {
		l, prefix, err := Detect(input)
		if err != nil {
			return info, 0, err
		}
		if l == c.Layout {
			if err := c.notOutput(input, prefix); err != nil {
				return info, 0, err
			}
		}
		r, err := Open(input, c.Hints)
		if err != nil {
			return info, 0, err
		}
		own := shards.TokenizerInfo{VocabSize: c.Hints.VocabSize, EOD: c.Hints.EOD}
		m, dtype := r.Manifest(), cmp.Or(r.DType(), shards.UInt32) // all ids fit 32 bits
		if m != nil {
			err = Verify(ctx, r, prefix)
		}
		if err := errors.Join(err, r.Close()); err != nil {
			return info, 0, err
		}
		if m != nil && !m.Foreign() {
			own = m.Tokenizer
		}
		switch {
		case i == 0:
			info = own
		case own != info:
			return info, 0, fmt.Errorf("%s and %s have different tokenizers or tokenizer settings in their "+
				"manifests; convert them separately", c.Inputs[0], input)
		}
		width = max(width, min(dtype.Size(), 4))
		if m == nil && c.limit(own) < dtype.IDs() {
			scan = append(scan, input)
		}
	}
	width = c.Layout.Widen(width).Size()
	for _, input := range scan {
		if err := checkIDs(ctx, input, c.Hints, c.limit(info)); err != nil {
			return info, 0, err
		}
	}
	return info, width, nil
}

// limit returns the exclusive upper bound of ids.
func (c *Conversion) limit(info shards.TokenizerInfo) int64 {
	if info.VocabSize > 0 {
		return int64(info.VocabSize)
	}
	return c.Layout.Widen(4).IDs()
}

// checkIDs returns an error unless all ids of a shard are below limit.
func checkIDs(ctx context.Context, input string, h Hints, limit int64) error {
	return each(ctx, input, h, func(n int64, doc shards.TokenDocument) error {
		for i, id := range doc.Tokens {
			if int64(id) >= limit {
				return fmt.Errorf("%s: token %d of document %d (from 0) is %d, but ids must be below %d; nothing "+
					"was written", input, i, n, id, limit)
			}
		}
		return nil
	})
}

// each calls do with every document of a shard and its number, counted from 0. It stops at the
// first error.
func each(ctx context.Context, input string, h Hints, do func(n int64, doc shards.TokenDocument) error) error {
	r, err := Open(input, h)
	if err != nil {
		return err
	}
	defer r.Close()
	n := int64(0)
	for doc, err := range r.All(ctx) {
		if err == nil {
			err = do(n, doc)
		}
		if err != nil {
			return err
		}
		n++
	}
	return nil
}

// notOutput returns an error if the output would replace an input, also through links.
func (c *Conversion) notOutput(input, prefix string) error {
	path, err := realPrefix(prefix)
	if err != nil {
		return err
	}
	output, err := realPrefix(c.Output)
	if err != nil {
		return err
	}
	same := path == output
	if rest, ok := strings.CutPrefix(path, output+"-"); ok && c.ShardTokens > 0 {
		same = strings.Trim(rest, "0123456789") == "" && rest != ""
	} else if c.ShardTokens > 0 {
		same = false
	}
	if same {
		return fmt.Errorf("%s is an input and would be replaced by the output; choose another prefix", input)
	}
	return nil
}

// realPrefix returns the absolute path of a prefix with the links of its folders resolved.
func realPrefix(prefix string) (string, error) {
	path, err := filepath.Abs(prefix)
	if err != nil {
		return "", err
	}
	folder, err := filepath.EvalSymlinks(filepath.Dir(path))
	if errors.Is(err, fs.ErrNotExist) { // no file can be replaced
		return path, nil
	}
	return filepath.Join(folder, filepath.Base(path)), err
}

// convert appends the documents of an input to the output.
func (c *Conversion) convert(ctx context.Context, input string, out *rolling) error {
	return each(ctx, input, c.Hints, func(n int64, doc shards.TokenDocument) error {
		out.read++
		if c.Progress != nil && (out.read&1023 == 0 || len(doc.Tokens) > 1<<16) {
			c.Progress(out.read, out.result.Tokens+out.tokens)
		}
		if len(doc.Tokens) == 0 && c.DropEmpty {
			out.result.Dropped++
			return nil
		}
		if doc.Origin == (shards.DocumentOrigin{}) { // name a document without an id after its position
			doc.Origin = shards.DocumentOrigin{ID: fmt.Sprintf("%s:%d", input, n+1), File: input, Line: n + 1}
		}
		return out.append(doc)
	})
}

// rolling is the output of a conversion.
type rolling struct {
	c      *Conversion
	info   shards.TokenizerInfo
	w      shards.DocumentWriter // nil between shards
	tokens int64                 // of w
	read   int64                 // documents
	result *Converted
}

// prefix returns the prefix of shard n.
func (o *rolling) prefix(n int) string {
	if o.c.ShardTokens == 0 {
		return o.c.Output
	}
	return fmt.Sprintf("%s-%05d", o.c.Output, n)
}

func (o *rolling) begin() (err error) {
	prefix := o.prefix(len(o.result.Shards))
	if o.c.Layout.Folder {
		if _, err := atomicfile.On(o.c.Options.FS).Clean(prefix); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	o.w, err = Create(o.c.Layout, prefix, o.info, o.c.Options)
	o.tokens = 0
	return err
}

func (o *rolling) append(doc shards.TokenDocument) error {
	size := int64(len(doc.Tokens))
	if limit := o.c.ShardTokens; o.w != nil && limit > 0 && o.tokens > 0 && o.tokens+size > limit {
		if err := o.close(); err != nil {
			return err
		}
	}
	if o.w == nil {
		if err := o.begin(); err != nil {
			return err
		}
	}
	o.tokens += size
	return o.w.Append(doc.Tokens, doc.Origin)
}

// close publishes the shard.
func (o *rolling) close() error {
	if o.w == nil {
		return nil
	}
	if err := o.w.Close(); err != nil {
		return err
	}
	m := o.w.Manifest()
	o.w, o.tokens = nil, 0
	s := WrittenShard{Prefix: o.prefix(len(o.result.Shards)), DType: m.DType, Documents: m.Documents, Tokens: m.Tokens}
	for _, f := range m.Files {
		s.Bytes += f.Bytes
	}
	o.result.Shards = append(o.result.Shards, s)
	o.result.Documents += m.Documents
	o.result.Tokens += m.Tokens
	return nil
}

func (o *rolling) abort() {
	if o.w != nil {
		o.w.Abort()
	}
}
