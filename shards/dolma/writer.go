// Package dolma writes and reads the token files of dolma, OLMo and OLMo-core: x.npy, which is an
// array without a numpy header in spite of its name, and x.csv.gz, with one line per document.
// docs/formats/layouts.md describes every byte.
package dolma

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/klauspost/compress/gzip"

	"mula/internal/filesystem"
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

// least is the smallest element type: OLMo-core uses the smallest type that holds the largest id
// (numpy.min_scalar_type of the size - 1).
const least = shards.UInt8

// FileName returns the path of a file by its name in the manifest: "npy", "csv.gz" or "sums".
func FileName(prefix, name string) string { return prefix + "." + name }

// Create creates the shard x.npy, x.csv.gz, x.sums, x.json. A width of 0 means the smallest
// type.
func Create(fsys filesystem.FS, prefix string, info shards.TokenizerInfo, width int) (shards.DocumentWriter, error) {
	if err := layout.CheckPrefix(prefix, npyExt, csvExt, sumsExt, manifestExt); err != nil {
		return nil, err
	}
	dtype, err := layout.TypeFor(prefix, width, info.VocabSize, least)
	if err != nil {
		return nil, err
	}
	return layout.NewWriter(layout.Description{
		FS: fsys, Layout: shards.Dolma, Prefix: prefix, DType: dtype, Info: info, Name: FileName, Manifest: prefix +
			manifestExt, Marker: "npy",
	}, func(files *layout.Files) (layout.Encoder, error) {
		npy, err := files.CreateIDs("npy")
		if err != nil {
			return nil, err
		}
		csv, err := files.Create("csv.gz")
		if err != nil {
			return nil, err
		}
		e := &encoder{dtype: dtype, npy: npy, gzip: gzip.NewWriter(csv.Buffer)}
		e.csv = bufio.NewWriterSize(e.gzip, 1<<16)
		return e, nil
	})
}

type encoder struct {
	dtype   shards.DType
	npy     io.Writer
	gzip    *gzip.Writer
	csv     *bufio.Writer
	at      int64
	scratch []byte
}

func (e *encoder) Append(tokens []uint32, origin shards.DocumentOrigin) error {
	if err := e.dtype.Write(e.npy, tokens, &e.scratch); err != nil {
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
