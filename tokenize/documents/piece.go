package documents

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"

	"golang.org/x/sync/errgroup"

	"mula/internal/objects"
)

// A Piece is a part of an input that can be read on its own. All pieces of an input, in order, hold
// exactly the documents of the input.
type Piece struct {
	File string // the input's name as the caller gave it; "-" is standard input
	// Start and End bound the piece. Their unit depends on the format:
	//
	//  - bytes of plain JSON lines, and of plain text whose lines are documents; a line belongs to
	//    the piece that holds the byte before it, and the first line to the first piece
	//  - row groups of Parquet
	//  - record batches of an Arrow file
	//
	// End is -1 if the piece extends to the end of the file, as the only piece of an input does.
	Start, End int64
}

// cutters is how many inputs are inspected in parallel: on a network each takes milliseconds of
// waiting.
const cutters = 16

// Pieces divides inputs into pieces of about target bytes on disk each. The bounds depend only on
// the inputs and target. An input that cannot be divided (compressed, JSON over several lines,
// Arrow streams, text files that are one document, "-") is one piece, and so is an input of at most
// target bytes. The first bytes of every regular file are read. An error names the file that cannot
// be read, or whose content and name disagree.
func Pieces(ctx context.Context, inputs []string, o Options, target int64) ([]Piece, error) {
	if target <= 0 {
		return nil, fmt.Errorf("a piece cannot have %d bytes; it must have at least one", target)
	}
	o = o.withDefaults()
	var scanner lineScanner
	if err := scanner.find(o.Text, o.idField()); err != nil {
		return nil, err
	}
	cut := make([][]Piece, len(inputs))
	errs := make([]error, len(inputs))
	var group errgroup.Group
	group.SetLimit(cutters)
	for i, input := range inputs {
		if ctx.Err() != nil {
			break
		}
		group.Go(func() error {
			cut[i], errs[i] = cutInput(ctx, input, o, scanner.paths, target)
			return nil
		})
	}
	group.Wait()
	var pieces []Piece
	for i := range inputs {
		if errs[i] != nil {
			return nil, errs[i]
		}
		pieces = append(pieces, cut[i]...)
	}
	if err := ctx.Err(); err != nil {
		return nil, fmt.Errorf("inspecting the inputs: %w", err)
	}
	return pieces, nil
}

// cutInput cuts one input.
func cutInput(ctx context.Context, input string, o Options, paths [2][]string, target int64) ([]Piece, error) {
	whole := []Piece{{File: input, End: -1}}
	if input == "-" {
		return whole, nil
	}
	if !objects.IsURL(input) {
		// before it is opened, which may block until another process opens a pipe
		if info, err := os.Stat(input); err == nil && !info.IsDir() && !info.Mode().IsRegular() {
			return whole, nil
		}
	}
	stream, file, err := openInput(ctx, input, nil)
	if err != nil {
		return nil, fmt.Errorf("reading documents: %w", err)
	}
	if file == nil { // a server does not send the size
		return whole, stream.Close()
	}
	defer file.Close()
	size := file.size
	head := make([]byte, min(512, size))
	n, err := file.ReadAt(head, 0)
	if head = head[:n]; err == nil && size > target && byMagic(head) == Auto { // the first line shows the format
		head = make([]byte, min(readBuffer, size))
		n, err = file.ReadAt(head, 0)
		head = head[:n]
	}
	if err != nil && err != io.EOF {
		return nil, fmt.Errorf("reading documents: %w", err)
	}
	c := compressionOf(head)
	if c != plain {
		return whole, nil // reading detects the format
	}
	if !o.KeepMark {
		head = bytes.TrimPrefix(head, []byte(byteOrderMark))
	}
	name := objects.Clean(input)
	bad := func(err error) error { return &DocumentError{File: name, Kind: BadStream, Err: err} }
	format, err := formatOf(name, head, c, o.Format)
	if err != nil {
		return nil, bad(err)
	}
	if size <= target || file.object != nil && !file.object.HasRanges() {
		return whole, nil
	}
	var bounds []int64 // start offsets of the units that pieces consist of
	switch {
	case format == JSONLines, format == Text && o.Unit == EachLine:
		count := max(1, (size+target/2)/target)
		if count == 1 {
			return whole, nil
		}
		pieces := make([]Piece, count)
		for i := range pieces {
			pieces[i] = Piece{File: input, Start: divide(size, int64(i), count), End: divide(size, int64(i)+1, count)}
		}
		return pieces, nil
	case format == Parquet:
		meta, err := readParquetMeta(file, size, o, paths)
		if err != nil {
			return nil, bad(explain(inMetadata("Parquet", err)))
		}
		if !meta.cuttable() {
			return whole, nil
		}
		for _, g := range meta.groups {
			bounds = append(bounds, g.start)
		}
	case format == Arrow && head[0] != 0xff && file.object == nil: // each piece needs the earlier batches' sizes
		blocks, _, err := readArrowFooter(file, size)
		if err != nil {
			return nil, bad(explain(inMetadata("Arrow", err)))
		}
		for _, k := range blocks {
			bounds = append(bounds, k.start)
		}
	}
	pieces := cutAt(input, bounds, size, target)
	if len(pieces) < 2 {
		return whole, nil
	}
	return pieces, nil
}

// divide returns a*i/n for i up to n, without overflow.
func divide(a, i, n int64) int64 { return a/n*i + a%n*i/n }

// cutAt divides units with these start offsets into pieces: each has about target bytes and at
// least one unit.
func cutAt(input string, bounds []int64, size, target int64) (pieces []Piece) {
	for i := 0; i < len(bounds); {
		next := i + 1
		for next < len(bounds) && end(bounds, next+1, size)-bounds[i] <= target {
			next++
		}
		pieces = append(pieces, Piece{File: input, Start: int64(i), End: int64(next)})
		i = next
	}
	return pieces
}

// end returns the start of unit i, or the size after the last unit.
func end(bounds []int64, i int, size int64) int64 {
	if i < len(bounds) {
		return bounds[i]
	}
	return size
}
