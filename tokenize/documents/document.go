package documents

import (
	"encoding/json"
	"fmt"
)

// A Document is one text of a corpus and the place it was read from.
//
// A document owns its Text: nothing reuses the bytes, so it may be kept, handed to another goroutine and changed.
type Document struct {
	// ID is the document's "id" field: a string as it stands, a number as it is spelt in the file. Without one (absent, null or
	// empty) it is the base name of the file and the line, "part-0001.jsonl.zst:17".
	ID string
	// Text is the "text" field, decoded: valid UTF-8, never empty.
	Text []byte
	// File is the input as it was named to [ReadDocuments]; "-" is standard input.
	File string
	// Line is the line of the document in the file after decompression, from 1.
	Line int64
	// Offset is the first byte of that line in the file after decompression, from 0.
	Offset int64
}

// Kind says what is wrong with a document that could not be used. Its text form names counters and stands in rejects files.
type Kind uint8

// What can be wrong with a document.
const (
	BadStream   Kind = iota + 1 // the file ends or breaks in the middle: nothing after this place can be read
	BadJSON                     // the line is not one JSON object
	BadUTF8                     // the line is not UTF-8, or an id or text escapes half a surrogate pair
	BadID                       // the id is neither a string nor a number, or longer than a shard can keep
	NoText                      // there is no "text"
	BadText                     // "text" is not a string
	Empty                       // "text" is the empty string
	LineTooLong                 // the line is longer than [ReadOptions.MaxLine]
	Unencodable                 // the tokenizer or the shard refused the text
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

// MarshalText makes a Kind readable as a value or a key of JSON.
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// A DocumentError is a document that cannot be used. Its message has the form "file:line (byte n): what, and what to do".
type DocumentError struct {
	File   string
	Line   int64  // from 1, as in [Document]
	Offset int64  // byte of the fault in the file after decompression, from 0
	ID     string // of the document, if the line could be read that far; otherwise empty
	Kind   Kind
	Err    error
}

func (e *DocumentError) Error() string {
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
