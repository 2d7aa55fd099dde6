// Package mds writes and reads folders of MosaicML Streaming: index.json and files of samples,
// shard.00000.mds and so on. A sample is a document, and its ids are the column tokens.
// docs/formats/layouts.md describes every byte.
package mds

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"mula/shards"
)

// Names in the folder.
const (
	indexName    = "index.json"
	manifestName = "mula.json"
	originsName  = "mula.docs.arrow"
	sumsName     = "mula.sums"
)

// The columns that mula reads and writes.
const (
	tokensColumn = "tokens"
	idColumn     = "id"
)

// config is the entry of a file of samples in index.json, without its name, size and hashes. The
// file itself also contains it as JSON.
type config struct {
	ColumnEncodings []string `json:"column_encodings"`
	ColumnNames     []string `json:"column_names"`
	ColumnSizes     []*int   `json:"column_sizes"` // in bytes, nil for a variable size
	Compression     *string  `json:"compression"`
	Format          string   `json:"format"`
	Hashes          []string `json:"hashes"`
	SizeLimit       *int64   `json:"size_limit"`
	Version         int      `json:"version"`
}

// file is a file of samples in index.json.
type file struct {
	config
	RawData contents  `json:"raw_data"`
	Samples int64     `json:"samples"`
	ZipData *contents `json:"zip_data"`
}

// contents is a file on disk.
type contents struct {
	Basename string            `json:"basename"`
	Bytes    int64             `json:"bytes"`
	Hashes   map[string]string `json:"hashes"`
}

// members returns c as the members of a JSON object, in the order and notation of Python's
// json.dumps with sort_keys. They are split because index.json has other members in between: first
// has the members before "raw_data", last has "size_limit" and the members after it.
func (c *config) members() (first, last string) {
	texts := func(list []string) string {
		quoted := make([]string, len(list))
		for i, s := range list {
			quoted[i] = strconv.QuoteToASCII(s) // the same as JSON for the names of columns and types
		}
		return "[" + strings.Join(quoted, ", ") + "]"
	}
	sizes := make([]string, len(c.ColumnSizes))
	for i, size := range c.ColumnSizes {
		sizes[i] = "null"
		if size != nil {
			sizes[i] = strconv.Itoa(*size)
		}
	}
	compression, limit := "null", "null"
	if c.Compression != nil {
		compression = strconv.QuoteToASCII(*c.Compression)
	}
	if c.SizeLimit != nil {
		limit = strconv.FormatInt(*c.SizeLimit, 10)
	}
	first = fmt.Sprintf(`"column_encodings": %s, "column_names": %s, "column_sizes": [%s], "compression": %s, "format": %q, "hashes": %s`,
		texts(c.ColumnEncodings), texts(c.ColumnNames), strings.Join(sizes, ", "), compression, c.Format,
		texts(c.Hashes))
	return first, fmt.Sprintf(`"size_limit": %s, "version": %d`, limit, c.Version)
}

// text returns the JSON text that each file of samples contains.
func (c *config) text() string {
	first, last := c.members()
	return "{" + first + ", " + last + "}"
}

// text returns the JSON text of a file in index.json.
func (f *file) text() string {
	first, last := f.members()
	zip := "null"
	if f.ZipData != nil {
		zip = f.ZipData.text()
	}
	// "raw_data" and "samples" sort between "hashes" and "size_limit", "zip_data" after "version".
	return fmt.Sprintf(`{%s, "raw_data": %s, "samples": %d, %s, "zip_data": %s}`, first, f.RawData.text(), f.Samples,
		last, zip)
}

func (c *contents) text() string {
	var hashes []string
	for name, sum := range c.Hashes {
		hashes = append(hashes, fmt.Sprintf("%q: %q", name, sum))
	}
	slices.Sort(hashes)
	return fmt.Sprintf(`{"basename": %q, "bytes": %d, "hashes": {%s}}`, c.Basename, c.Bytes, strings.Join(hashes, ", "))
}

// samples are the samples of one file while it is written.
type samples struct {
	config string   // the result of [config.text]
	ends   []uint32 // end of each sample, from the start of the first
	data   []byte
}

// size returns the size of the file after a sample of more bytes is added.
func (s *samples) size(more int64) int64 {
	return int64(4+4+len(s.config)+4*(len(s.ends)+1)+len(s.data)) + more
}

// head returns the bytes of the file before its samples: their number, the start of each, the end
// of the last, and the configuration.
func (s *samples) head() []byte {
	n := len(s.ends)
	out := make([]byte, 0, 8+4*n+len(s.config))
	out = binary.LittleEndian.AppendUint32(out, uint32(n))
	start := uint32(8 + 4*n + len(s.config))
	out = binary.LittleEndian.AppendUint32(out, start)
	for _, end := range s.ends {
		out = binary.LittleEndian.AppendUint32(out, start+end)
	}
	return append(out, s.config...)
}

// valueTypes are the element types of arrays of numbers, by their code in an ndarray whose encoding
// name has no type.
var valueTypes = map[byte]shards.DType{8: shards.UInt8, 9: shards.Int8, 16: shards.UInt16, 17: shards.Int16,
	32: shards.UInt32, 33: shards.Int32, 64: shards.UInt64, 65: shards.Int64}

func typeNamed(name string) (shards.DType, error) {
	for _, t := range valueTypes {
		if string(t) == name {
			return t, nil
		}
	}
	return "", fmt.Errorf("ids cannot be %q; element types are uint8 to uint64 and int8 to int64", name)
}

// appendIDs appends the numbers encoded in src to dst.
func appendIDs(dst []uint32, src []byte, t shards.DType) ([]uint32, error) {
	if len(src)%t.Size() != 0 {
		return dst, fmt.Errorf("%d bytes are not a multiple of the size of %s", len(src), t)
	}
	before := len(dst)
	dst, err := t.AppendChecked(dst, src)
	if err != nil {
		return dst, fmt.Errorf("element %d is %w", len(dst)-before, err)
	}
	return dst, nil
}

// An encoding describes how the values of a column are stored, as far as mula reads them.
type encoding struct {
	array    bool
	value    shards.DType // element type, "" if each value has its own type
	elements int          // from the shape in the encoding name, -1 if each value has its own shape
}

// parseTokens parses the encoding of the column of ids. bytesOf is the element type for the
// encoding bytes, or "".
func parseTokens(text, bytesOf string) (e encoding, err error) {
	e.elements = -1
	parts := strings.Split(text, ":")
	switch {
	case text == "bytes":
		if bytesOf == "" {
			return e, fmt.Errorf("the column %q contains bytes, and the type of the ids in them is unknown; "+
				"give the type (llm-foundry writes int64)", tokensColumn)
		}
		e.value, err = typeNamed(bytesOf)
	case parts[0] == "ndarray" && len(parts) <= 3:
		e.array = true
		if len(parts) > 1 && parts[1] != "" {
			e.value, err = typeNamed(parts[1])
		}
		if len(parts) == 3 && err == nil {
			e.elements = 1
			for _, dim := range strings.Split(parts[2], ",") {
				d, err := strconv.Atoi(dim)
				if err != nil || d < 1 || e.elements > (1<<31)/d {
					return e, fmt.Errorf("the column %q has the encoding %q with an invalid shape", tokensColumn, text)
				}
				e.elements *= d
			}
		}
	default:
		return e, fmt.Errorf("the column %q has the encoding %q; want bytes or ndarray", tokensColumn,
			text)
	}
	return e, err
}

// appendIDs appends the ids of a value to dst.
func (e encoding) appendIDs(dst []uint32, src []byte) (_ []uint32, err error) {
	t := e.value
	if e.array && t == "" {
		if len(src) == 0 {
			return dst, fmt.Errorf("an array without an element type")
		}
		if t = valueTypes[src[0]]; t == "" {
			return dst, fmt.Errorf("an array with element type %d, which is not a type of ids", src[0])
		}
		src = src[1:]
	}
	elements := e.elements
	if e.array && elements < 0 {
		if len(src) == 0 {
			return dst, fmt.Errorf("an array without a shape")
		}
		dims, size := int(src[0]>>2), 1<<(src[0]&3)
		if len(src) < 1+dims*size {
			return dst, fmt.Errorf("an array of %d dimensions does not fit %d bytes", dims, len(src))
		}
		shape := src[1 : 1+dims*size]
		src = src[1+dims*size:]
		product := uint64(1)
		for i := 0; i < len(shape); i += size {
			var b [8]byte
			copy(b[:], shape[i:i+size])
			if d := binary.LittleEndian.Uint64(b[:]); d <= uint64(len(src)) {
				product *= d
			} else {
				product = uint64(len(src)) + 1
			}
			if product > uint64(len(src)) {
				return dst, fmt.Errorf("the shape has more elements than the %d bytes hold", len(src))
			}
		}
		elements = int(product)
	}
	if e.array && len(src) != elements*t.Size() {
		return dst, fmt.Errorf("an array of %d %s does not match %d bytes", elements, t, len(src))
	}
	return appendIDs(dst, src, t)
}

// appendArrayHead appends the start of a value with the encoding ndarray:TYPE to dst, up to its
// elements: one byte with the number of dimensions and the size of a length, then the length in the
// fewest possible bytes.
func appendArrayHead(dst []byte, elements int) []byte {
	n := uint64(elements)
	switch {
	case n < 1<<8:
		return append(dst, 1<<2, byte(n))
	case n < 1<<16:
		return binary.LittleEndian.AppendUint16(append(dst, 1<<2|1), uint16(n))
	default:
		return binary.LittleEndian.AppendUint32(append(dst, 1<<2|2), uint32(n))
	}
}
