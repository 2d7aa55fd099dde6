// Package documents reads documents from files: JSON lines, JSON, text, Parquet and Arrow, plain or
// compressed with gzip or zstd.
//
// Inputs are divided into pieces that several readers process independently. The documents and
// their order do not depend on the division. docs/formats/documents.md specifies the formats.
package documents

import (
	"encoding/json"
	"fmt"
	"strconv"
)

// A Document is one text of a corpus, with its location. File and Offset identify it, however the
// input is divided into pieces.
//
// A Document owns its Text: nothing reuses the bytes, so a caller may keep them, change them, and
// pass them to another goroutine. Small documents share an allocation, so a document that is kept
// may keep up to 128 KiB of other documents in memory.
type Document struct {
	// ID is the document's own id: a string unchanged, or the digits of a number as they are
	// written. If the id is absent, null or empty, a [Reader] leaves ID empty, and [ReadDocuments]
	// sets the [DefaultID].
	ID string
	// Text is the text, decoded: valid UTF-8, never empty.
	Text []byte
	// File is the input's name as the caller gave it; "-" is standard input.
	File string
	// Line is the line, the object's first line or the row, from 1. A [Reader] counts within the
	// piece, [ReadDocuments] within the input.
	Line int64
	// Offset is the first byte of that line or object in the decompressed file, or the row in the
	// file, from 0.
	Offset int64
}

// Kind classifies a document that could not be used. Its text form is the name of a counter and the
// kind in a rejects file.
type Kind uint8

// The kinds of unusable documents.
const (
	// the file ends early, is damaged, or has another format; nothing after this point can be read
	BadStream Kind = iota + 1
	BadJSON        // the line, or the object of several lines, is not one JSON object
	BadUTF8        // the line or text is not UTF-8, or an id or text escapes half a surrogate pair
	BadID          // the id is neither a string nor a number, or longer than a shard can keep
	NoText         // the field is missing, or null in its column
	BadText        // the text is not a string
	// the text is the empty string, or has no tokens although the shards' layout needs some
	Empty
	LineTooLong // the line, object, file or text is longer than [Options.MaxLine]
	Unencodable // the tokenizer or the shard refused the text
)

var kindNames = [...]string{
	BadStream:   "broken stream",
	BadJSON:     "malformed JSON",
	BadUTF8:     "invalid UTF-8",
	BadID:       "bad id",
	NoText:      "no text",
	BadText:     "text is not a string",
	Empty:       "empty document",
	LineTooLong: "line too long",
	Unencodable: "not encodable",
}

func (k Kind) String() string {
	if int(k) < len(kindNames) && kindNames[k] != "" {
		return kindNames[k]
	}
	return fmt.Sprintf("Kind(%d)", uint8(k))
}

// Remedy returns the action against this kind of fault, in the imperative.
func (k Kind) Remedy() string {
	switch k {
	case BadUTF8:
		return "convert the file to UTF-8"
	case NoText, BadText:
		return "set the field of the texts with --text-field, or repair the document"
	case BadID:
		return "set the field of the ids with --id-field, or repair the document"
	case LineTooLong:
		return "split the document"
	}
	return "repair the document"
}

// MarshalText returns the name of the Kind, for JSON values and keys.
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads a name that MarshalText wrote.
func (k *Kind) UnmarshalText(text []byte) error {
	for i, name := range kindNames {
		if name != "" && name == string(text) {
			*k = Kind(i)
			return nil
		}
	}
	return fmt.Errorf("unknown kind of unusable document %q", text)
}

// DefaultID is the id of a document that has no id of its own: the name of its input (see
// [uniqueNames]) and its line in the file, as in "web/part-0001.jsonl.zst:17".
func DefaultID(name string, line int64) string {
	return name + ":" + strconv.FormatInt(line, 10)
}

// A DocumentError is a document that cannot be used. Its message has the form "file:line (byte n):
// problem", or "file: problem" if the whole file is at fault.
type DocumentError struct {
	File string
	Line int64 // as in [Document]; 0 if the fault has no line
	// byte of the fault in the decompressed file, byte within the line or object, or row in the
	// file; from 0
	Offset int64
	ID     string // the document's id if the line could be read that far; otherwise empty
	Kind   Kind
	Err    error
}

func (e *DocumentError) Error() string {
	if e.Line == 0 {
		return fmt.Sprintf("%s: %s", e.File, e.Err)
	}
	return fmt.Sprintf("%s:%d (byte %d): %s", e.File, e.Line, e.Offset, e.Err)
}

func (e *DocumentError) Unwrap() error { return e.Err }

// MarshalJSON returns the error as a line of a rejects file.
func (e *DocumentError) MarshalJSON() ([]byte, error) {
	return json.Marshal(struct {
		File  string `json:"file"`
		Line  int64  `json:"line"`
		Byte  int64  `json:"byte"`
		ID    string `json:"id,omitempty"`
		Kind  Kind   `json:"kind"`
		Error string `json:"error"`
	}{e.File, e.Line, e.Offset, e.ID, e.Kind, e.Err.Error()})
}
