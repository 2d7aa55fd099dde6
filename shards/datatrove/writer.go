// Package datatrove writes and reads the token files of datatrove and nanotron: x.ds is an array of
// ids without a header, x.ds.index has the end of each document, and x.ds.metadata has three lines
// of text. docs/formats/layouts.md describes every byte.
package datatrove

import (
	"encoding/binary"
	"fmt"
	"math"
	"strconv"
	"strings"

	"mula/internal/atomicfile"
	"mula/shards"
	"mula/shards/layout"
)

// Suffixes of a shard's files.
const (
	dsExt       = ".ds"
	indexExt    = ".ds.index"
	metadataExt = ".ds.metadata"
	lossExt     = ".ds.loss"
	docsExt     = ".docs.arrow"
	sumsExt     = ".sums"
	manifestExt = ".json"
)

// Layout is the layout of datatrove and nanotron. Its element type is uint16 up to 65,536 ids, else
// uint32.
var Layout = layout.Layout{
	ID: id, Name: "datatrove", Users: "datatrove, nanotron",
	Shape:  "PREFIX.ds, PREFIX.ds.index, PREFIX.ds.metadata",
	Marker: dsExt, Own: []string{indexExt, metadataExt}, Manifest: manifestExt, Sums: sumsExt, Origins: docsExt,
	IDs: dsExt, Types: types, NoEmpty: "datatrove's reader miscounts positions after an empty document",
	Create: create,
	Open:   func(prefix string, h layout.Hints) (shards.DocumentReader, error) { return open(prefix, h) },
}

const id shards.Layout = "datatrove"

var types = []shards.DType{shards.UInt16, shards.UInt32}

// create creates the shard x.ds, x.ds.index, x.ds.metadata, x.docs.arrow, x.sums, x.json. The
// tokenizer's name in x.ds.metadata, with which nanotron loads it, is its SHA-256 unless the
// settings have a name.
func create(l *layout.Layout, s layout.Settings) (shards.DocumentWriter, error) {
	tokenizer := s.TokenizerName
	if tokenizer == "" {
		tokenizer = "unknown"
		if s.Info.SHA256 != "" {
			tokenizer = "sha256:" + s.Info.SHA256
		}
	}
	if strings.ContainsAny(tokenizer, "|\r\n") {
		return nil, fmt.Errorf("%s%s cannot name the tokenizer %q: it has a vertical bar or a line break", s.Prefix,
			metadataExt, tokenizer)
	}
	stale := func() ([]string, error) { return []string{s.Prefix + lossExt}, nil }
	return l.NewWriter(s, stale, func(files *shards.FileSet) (_ shards.Encoder, err error) {
		e := &encoder{dtype: s.DType, tokenizer: tokenizer}
		if e.ds, err = files.CreateIDs("ds"); err == nil {
			if e.index, err = files.Create("ds.index"); err == nil {
				e.metadata, err = files.Create("ds.metadata")
			}
		}
		return e, err
	})
}

type encoder struct {
	dtype           shards.DType
	tokenizer       string
	ds              *shards.IDFile
	index, metadata *atomicfile.Hashed
	at              int64
	scratch         []byte
}

func (e *encoder) Append(tokens []uint32, _ shards.DocumentOrigin) error {
	if err := e.ds.Append(tokens, e.dtype); err != nil {
		return err
	}
	e.at += int64(len(tokens))
	e.scratch = binary.LittleEndian.AppendUint64(e.scratch[:0], uint64(e.at))
	_, err := e.index.Buffer.Write(e.scratch)
	return err
}

func (e *encoder) Finish() error {
	_, err := fmt.Fprintf(e.metadata.Buffer, "%s|%d\n%d\n%s", e.tokenizer, e.dtype.Size(), e.at, metric(e.at))
	return err
}

// metric formats a number of tokens with three digits and a metric prefix, as metric of Python's
// humanize does with the unit T.
func metric(n int64) string {
	digits := len(strconv.FormatInt(n, 10))
	bucket := (digits - 1) / 3
	value := float64(n) / math.Pow10(3*bucket)
	text := strconv.FormatFloat(value, 'f', 2-(digits-1)%3, 64)
	if len(strings.SplitN(text, ".", 2)[0]) > (digits-1)%3+1 { // 9.999 became 10.00, or 999.9 became 1000
		digits++
		if digits%3 == 1 {
			value, bucket = value/1000, bucket+1
		}
		text = strconv.FormatFloat(value, 'f', 2-(digits-1)%3, 64)
	}
	if bucket == 0 {
		return text + " T"
	}
	return text + " " + "kMGTPE"[bucket-1:bucket] + "T"
}
