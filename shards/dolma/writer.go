// Package dolma writes and reads the token files of dolma, OLMo and OLMo-core: x.npy, which is an
// array without a numpy header in spite of its name, and x.csv.gz, with one line per document.
// docs/formats/layouts.md describes every byte.
package dolma

import (
	"bufio"
	"fmt"
	"strconv"
	"strings"

	"github.com/klauspost/compress/gzip"

	"mula/shards"
	"mula/shards/layout"
)

// Suffixes of a shard's files.
const (
	npyExt      = ".npy"
	csvExt      = ".csv.gz"
	sumsExt     = ".sums"
	manifestExt = ".json"
)

// Layout is the layout of dolma and OLMo. Its element type is the smallest type that holds the
// largest id, as OLMo-core chooses it (numpy.min_scalar_type of the size of the vocabulary - 1).
var Layout = layout.Layout{
	ID: id, Name: "dolma", Users: "dolma, OLMo, OLMo-core", Shape: "PREFIX.npy, PREFIX.csv.gz",
	Marker: npyExt, Own: []string{csvExt}, Manifest: manifestExt, Sums: sumsExt,
	IDs: npyExt, Types: types, Derives: "OLMo",
	Create: create,
	Open:   func(prefix string, h layout.Hints) (shards.DocumentReader, error) { return open(prefix, h) },
}

const id shards.Layout = "dolma"

var types = []shards.DType{shards.UInt8, shards.UInt16, shards.UInt32}

// create creates the shard x.npy, x.csv.gz, x.sums, x.json.
func create(l *layout.Layout, s layout.Settings) (shards.DocumentWriter, error) {
	return l.NewWriter(s, nil, func(files *shards.FileSet) (shards.Encoder, error) {
		npy, err := files.CreateIDs("npy")
		if err != nil {
			return nil, err
		}
		csv, err := files.Create("csv.gz")
		if err != nil {
			return nil, err
		}
		e := &encoder{dtype: s.DType, npy: npy, gzip: gzip.NewWriter(csv.Buffer)}
		e.csv = bufio.NewWriterSize(e.gzip, 1<<16)
		return e, nil
	})
}

type encoder struct {
	dtype   shards.DType
	npy     *shards.IDFile
	gzip    *gzip.Writer
	csv     *bufio.Writer
	at      int64
	scratch []byte
}

func (e *encoder) Append(tokens []uint32, origin shards.DocumentOrigin) error {
	if err := e.npy.Append(tokens, e.dtype); err != nil {
		return err
	}
	end := e.at + int64(len(tokens))
	row := strconv.AppendInt(e.scratch[:0], e.at, 10)
	row = append(row, ',')
	row = strconv.AppendInt(row, end, 10)
	row = append(row, ',')
	row = appendField(row, origin.ID)
	row = append(row, ',')
	row = appendField(row, origin.File)
	row = append(row, ',')
	row = strconv.AppendInt(row, origin.Line, 10)
	row = append(row, '\r', '\n')
	e.scratch, e.at = row, end
	_, err := e.csv.Write(row)
	return err
}

// appendField appends a field as Python's csv module writes it by default: in quotes if it contains
// a comma or a quote, with quotes doubled. Python would write a line break within quotes, but
// OLMo-core reads the file line by line and ignores quotes. So line breaks are written as \r and
// \n, two characters each.
func appendField(row []byte, field string) []byte {
	if !strings.ContainsAny(field, ",\"\r\n") {
		return append(row, field...)
	}
	quote := strings.ContainsAny(field, ",\"")
	if quote {
		row = append(row, '"')
	}
	for i := range len(field) {
		switch c := field[i]; c {
		case '"':
			row = append(row, '"', '"')
		case '\r':
			row = append(row, `\r`...)
		case '\n':
			row = append(row, `\n`...)
		default:
			row = append(row, c)
		}
	}
	if quote {
		row = append(row, '"')
	}
	return row
}

func (e *encoder) Finish() error {
	err := e.csv.Flush()
	if err == nil {
		err = e.gzip.Close()
	}
	if err != nil {
		return fmt.Errorf("compressing the list of documents: %w", err)
	}
	return nil
}
