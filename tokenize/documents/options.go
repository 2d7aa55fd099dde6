package documents

import (
	"fmt"
	"io"
	"strings"
)

// DefaultMaxLine is the length of the longest document that is read unless [Options.MaxLine] says
// otherwise, in bytes after decompression.
const DefaultMaxLine = 256 << 20

// A Format is how documents lie in a file. Gzip and zstd around JSON lines, JSON, text and Arrow
// streams are undone whatever the format.
type Format uint8

// The formats that are read.
const (
	// Auto finds the format by the first bytes of the file, and then by its name.
	Auto Format = iota
	// JSONLines has an object a line (RFC 8259, UTF-8).
	JSONLines
	// JSON has an array of objects, or objects one after the other, over any number of lines.
	JSON
	// Text is UTF-8 without any structure but lines; see [Unit].
	Text
	// Parquet is Apache Parquet, a document a row. It needs a regular file.
	Parquet
	// Arrow is Apache Arrow IPC, file ("Feather 2") or stream, a document a row.
	Arrow
)

var formatNames = [...]string{"auto", "jsonl", "json", "text", "parquet", "arrow"}

func (f Format) String() string {
	if int(f) < len(formatNames) {
		return formatNames[f]
	}
	return fmt.Sprintf("Format(%d)", uint8(f))
}

// ParseFormat gives the format of a name: auto, jsonl, json, text, parquet or arrow.
func ParseFormat(name string) (Format, error) {
	for i, n := range formatNames {
		if n == name {
			return Format(i), nil
		}
	}
	return 0, fmt.Errorf("%q is no format of documents; there are %s", name, strings.Join(formatNames[:], ", "))
}

// A Unit is what a document of a text file is.
type Unit uint8

// The units of text.
const (
	WholeFile Unit = iota // the file is one document
	EachLine              // every line that is not white space alone is one, without the LF or CRLF that ends it
)

var unitNames = [...]string{"file", "line"}

func (u Unit) String() string {
	if int(u) < len(unitNames) {
		return unitNames[u]
	}
	return fmt.Sprintf("Unit(%d)", uint8(u))
}

// ParseUnit gives the unit of a name: file or line.
func ParseUnit(name string) (Unit, error) {
	for i, n := range unitNames {
		if n == name {
			return Unit(i), nil
		}
	}
	return 0, fmt.Errorf("%q is no unit of text; there are %s", name, strings.Join(unitNames[:], ", "))
}

// Options are the choices for reading documents; the zero value is good.
type Options struct {
	// Text and ID name the fields that hold a document's text and id; "" means "text" and "id". A
	// dot leads into an object or a struct: "metadata.url". A dot that belongs to a name is written
	// \. and a backslash \\.
	Text, ID string
	// Format is how documents lie in all inputs.
	Format Format
	// Unit is what a document of a text file is.
	Unit Unit
	// KeepMark leaves a byte order mark at the start of JSON lines, JSON and text where it is.
	// Otherwise it is removed.
	KeepMark bool
	// MaxLine is the length of the longest line, object, text file or text that is read, in bytes
	// after decompression; 0 means [DefaultMaxLine]. Memory for about two of them is taken where
	// they occur.
	MaxLine int
	// Stdin is what the input "-" reads; nil means os.Stdin.
	Stdin io.Reader
}

// idField is the name of the field of the id.
func (o Options) idField() string {
	if o.ID == "" {
		return "id"
	}
	return o.ID
}
