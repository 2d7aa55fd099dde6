package documents

import (
	"fmt"
	"io"
	"slices"
	"strings"
)

// defaultMaxLine is the length of the longest document that is read if [Options.MaxLine] is 0, in
// bytes after decompression.
const defaultMaxLine = 256 << 20

// A Format is the file format of documents. Gzip and zstd around JSON lines, JSON, text and Arrow
// streams are decompressed with every format.
type Format uint8

// The formats that can be read.
const (
	// Auto detects the format from the first bytes of the file, then from its name.
	Auto Format = iota
	// JSONLines has one object per line (RFC 8259, UTF-8).
	JSONLines
	// JSON has an array of objects, or a sequence of objects, over any number of lines.
	JSON
	// Text is UTF-8 with no structure except lines; see [Unit].
	Text
	// Parquet is Apache Parquet with one document per row. It needs a regular file.
	Parquet
	// Arrow is Apache Arrow IPC, file ("Feather 2") or stream, with one document per row.
	Arrow
)

var formatNames = [...]string{"auto", "jsonl", "json", "text", "parquet", "arrow"}

func (f Format) String() string {
	if int(f) < len(formatNames) {
		return formatNames[f]
	}
	return fmt.Sprintf("Format(%d)", uint8(f))
}

// Formats lists the names that [ParseFormat] accepts.
func Formats() []string { return slices.Clone(formatNames[:]) }

// ParseFormat returns the format with this name: auto, jsonl, json, text, parquet or arrow.
func ParseFormat(name string) (Format, error) {
	for i, n := range formatNames {
		if n == name {
			return Format(i), nil
		}
	}
	return 0, fmt.Errorf("unknown document format %q; the formats are %s", name, strings.Join(formatNames[:], ", "))
}

// A Unit defines what one document of a text file is.
type Unit uint8

// The units of text.
const (
	wholeFile Unit = iota // the file is one document
	EachLine              // every line that is not blank is a document, without its LF or CRLF
)

var unitNames = [...]string{"file", "line"}

func (u Unit) String() string {
	if int(u) < len(unitNames) {
		return unitNames[u]
	}
	return fmt.Sprintf("Unit(%d)", uint8(u))
}

// Units lists the names that [ParseUnit] accepts.
func Units() []string { return slices.Clone(unitNames[:]) }

// ParseUnit returns the unit with this name: file or line.
func ParseUnit(name string) (Unit, error) {
	for i, n := range unitNames {
		if n == name {
			return Unit(i), nil
		}
	}
	return 0, fmt.Errorf("unknown text unit %q; the units are %s", name, strings.Join(unitNames[:], ", "))
}

// Options are the options for reading documents. The zero value has the defaults.
type Options struct {
	// Text and ID are the fields that hold a document's text and id. "" means "text" and "id". A
	// dot selects a field of an object or a struct: "metadata.url". Write \. for a dot in a name,
	// and \\ for a backslash.
	Text, ID string
	// Format is the file format of all inputs.
	Format Format
	// Unit defines what one document of a text file is.
	Unit Unit
	// KeepMark keeps a byte order mark at the start of JSON lines, JSON and text. By default the
	// mark is removed.
	KeepMark bool
	// MaxLine is the length of the longest line, object, text file or text that is read, in bytes
	// after decompression. 0 means [defaultMaxLine]. The reader allocates memory for about two such
	// lines when it meets one.
	MaxLine int
	// Stdin is the reader of the input "-"; nil means os.Stdin.
	Stdin io.Reader
}

// idField returns the name of the field of the id.
func (o Options) idField() string {
	if o.ID == "" {
		return "id"
	}
	return o.ID
}
