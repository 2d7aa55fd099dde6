// Package documents reads documents from files: JSON lines, JSON, text, Parquet and Arrow, plain or
// compressed with gzip or zstd.
//
// Inputs are divided into pieces that several readers process independently. The documents and their
// order do not depend on the division. docs/formats/documents.md specifies the formats.
package documents

import (
	"encoding/json"
	"fmt"
	"strconv"
)

// A Document is one text of a corpus and the place it was read from. File and Offset name it,
// however its input is cut into pieces.
//
// A document owns its Text: nothing reuses the bytes, so it may be kept, handed to another
// goroutine and changed. Small documents share an allocation, so that one that is kept may keep up
// to 128 KiB of others.
type Document struct {
	// ID is the document's own: a string as it stands, a number as it is spelt. Without one
	// (absent, null or empty) a [Reader] leaves it empty and [ReadDocuments] gives the [DefaultID].
	ID string
	// Text is the text, decoded: valid UTF-8, never empty.
	Text []byte
	// File is the input as it was named; "-" is standard input.
	File string
	// Line is the line, object's first line or row, from 1: within the piece by a [Reader], within
	// the input by [ReadDocuments].
	Line int64
	// Offset is the first byte of that line or object in the file after decompression, or the row
	// in the file, from 0.
	Offset int64
}

// Kind says what is wrong with a document that could not be used. Its text form names counters and
// stands in rejects files.
type Kind uint8

// What can be wrong with a document.
const (
	// the file ends or breaks in the middle, or is no file of its format: nothing after this place
	// can be read
	BadStream Kind = iota + 1
	BadJSON        // the line, or the object of several lines, is not one JSON object
	BadUTF8        // the line or text is not UTF-8, or an id or text escapes half a surrogate pair
	BadID          // the id is neither a string nor a number, or longer than a shard can keep
	NoText         // there is no text, or a null in its column
	BadText        // the text is not a string
	// the text is the empty string, or has no tokens where the layout of the shards wants some
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

// Remedy says what to do about a document that is bad in this way, in the imperative.
func (k Kind) Remedy() string {
	switch k {
	case BadUTF8:
		return "convert the file to UTF-8"
	case NoText, BadText:
		return "name the field of the texts with --text-field, repair the document"
	case BadID:
		return "name the field of the ids with --id-field, repair the document"
	case LineTooLong:
		return "split the document"
	}
	return "repair the document"
}

// MarshalText makes a Kind readable as a value or a key of JSON.
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// UnmarshalText reads what MarshalText has written.
func (k *Kind) UnmarshalText(text []byte) error {
	for i, name := range kindNames {
		if name != "" && name == string(text) {
			*k = Kind(i)
			return nil
		}
	}
	return fmt.Errorf("%q is no kind of a document that could not be used", text)
}

// DefaultID is the id of a document that has none of its own: the name of its input (see
// [UniqueNames]) and its line, counted from the start of the file, "web/part-0001.jsonl.zst:17".
func DefaultID(name string, line int64) string {
	return name + ":" + strconv.FormatInt(line, 10)
}

// A DocumentError is a document that cannot be used. Its message has the form "file:line (byte n):
// what", or "file: what" if the whole file is at fault.
type DocumentError struct {
	File string
	Line int64 // as in [Document]; 0 if the fault has no place in the file
	// byte of the fault in the file after decompression, within the line or object, or the row in
	// the file; from 0
	Offset int64
	ID     string // of the document, if the line could be read that far; otherwise empty
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

// MarshalJSON writes the error as a line of a rejects file.
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
