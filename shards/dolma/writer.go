// Package dolma writes and reads the token files of dolma, OLMo and OLMo-core: x.npy, which in
// spite of its name is an array without a header, and x.csv.gz, a line a document.
// docs/formats/layouts.md has every byte.
package dolma

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"

	"github.com/klauspost/compress/gzip"

	"mula/shards"
	"mula/shards/layout"
)

// Endings of a shard's files.
const (
	npyExt      = ".npy"
	csvExt      = ".csv.gz"
	sumsExt     = ".sums"
	manifestExt = ".json"
)

// WidthFor is the element type that OLMo-core takes for a vocabulary: the smallest that holds its
// largest id (numpy.min_scalar_type of the size - 1). For a vocabulary that is not known, 0, it is
// uint32.
func WidthFor(vocabSize int) layout.Width {
	switch {
	case vocabSize <= 0 || vocabSize > 1<<16:
		return 4
	case vocabSize > 1<<8:
		return 2
	}
	return 1
}

// FileName is the path of a file by its name in the manifest, "npy", "csv.gz" or "sums".
func FileName(prefix, name string) string { return prefix + "." + name }

// Create starts the shard x.npy, x.csv.gz, x.sums, x.json. A width of 0 is [WidthFor].
func Create(prefix string, info shards.TokenizerInfo, width layout.Width) (shards.DocumentWriter, error) {
	if err := layout.CheckPrefix(prefix, npyExt, csvExt, sumsExt, manifestExt); err != nil {
		return nil, err
	}
	if width == 0 {
		width = WidthFor(info.VocabSize)
	}
	return layout.NewWriter(layout.Description{
		Layout: shards.Dolma, Prefix: prefix, Width: width, Info: info, Name: FileName, Manifest: prefix +
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
		e := &encoder{width: width, npy: npy, gzip: gzip.NewWriter(csv.Buffer)}
		e.csv = bufio.NewWriterSize(e.gzip, 1<<16)
		return e, nil
	})
}

type encoder struct {
	width   layout.Width
	npy     io.Writer
	gzip    *gzip.Writer
	csv     *bufio.Writer
	at      int64
	scratch []byte
}

func (e *encoder) Append(tokens []uint32, origin shards.DocumentOrigin) error {
	if err := e.width.Write(e.npy, tokens, &e.scratch); err != nil {
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

// appendField adds a field as Python's csv module writes it with its defaults: in quotes if it has
// a comma or a quote, quotes doubled. Python would keep a line break within quotes; OLMo-core reads
// the file by lines, without regard to quotes, and would end at such a one. So line breaks are
// written as \r and \n, two characters each.
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
