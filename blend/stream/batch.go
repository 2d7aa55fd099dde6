package stream

import (
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
)

// A Batch is a typed view of a record of a [Stream]. It is valid until the record is released.
type Batch struct {
	rows, length int // samples, tokens of a sample
	position     *array.Int64
	source       *array.Dictionary
	names        *array.String // of the sources
	epoch        *array.Int32
	window       *array.Int64
	tokens2      []uint16 // of all rows; either tokens2 or tokens4 is nil
	tokens4      []int32
	starts       *array.List
	startValues  []int32
	lengths      *array.Int32 // nil unless the plan is packed
}

// NewBatch returns a view of r. It fails if r does not have the columns of a sample stream.
func NewBatch(r arrow.RecordBatch) (*Batch, error) {
	b := &Batch{rows: int(r.NumRows())}
	if n := r.NumCols(); n != columnDocumentStarts+1 && n != columnLengths+1 {
		return nil, fmt.Errorf("a record with %d columns is not from a sample stream", r.NumCols())
	}
	tokens, ok := r.Column(columnTokens).(*array.FixedSizeList)
	if !ok {
		return nil, fmt.Errorf("column %q is %s, not a fixed-size list", r.ColumnName(columnTokens),
			r.Column(columnTokens).DataType())
	}
	b.length = int(tokens.DataType().(*arrow.FixedSizeListType).Len())
	from, to := tokens.Offset()*b.length, (tokens.Offset()+tokens.Len())*b.length
	switch values := tokens.ListValues().(type) {
	case *array.Uint16:
		b.tokens2 = values.Values()[from:to]
	case *array.Int32:
		b.tokens4 = values.Values()[from:to]
	default:
		return nil, fmt.Errorf("tokens are %s, want uint16 or int32", values.DataType())
	}
	var starts *array.Int32
	for _, ok := range []bool{
		as(r, columnPosition, &b.position), as(r, columnSource, &b.source), as(r, columnEpoch, &b.epoch), as(r,
			columnWindow, &b.window),
		as(r, columnDocumentStarts, &b.starts), r.NumCols() <= columnLengths || as(r, columnLengths, &b.lengths),
	} {
		if !ok {
			return nil, fmt.Errorf("the record does not have the columns of a sample stream: %s", r.Schema())
		}
	}
	if starts, ok = b.starts.ListValues().(*array.Int32); !ok {
		return nil, fmt.Errorf("document starts are %s, want int32", b.starts.ListValues().DataType())
	}
	b.startValues = starts.Values()
	if b.names, ok = b.source.Dictionary().(*array.String); !ok {
		return nil, fmt.Errorf("sources are %s, want strings", b.source.Dictionary().DataType())
	}
	return b, nil
}

func as[T arrow.Array](r arrow.RecordBatch, column int, to *T) bool {
	var ok bool
	*to, ok = r.Column(column).(T)
	return ok
}

// Rows returns the number of samples.
func (b *Batch) Rows() int { return b.rows }

// Position returns the position of a row's sample in the plan.
func (b *Batch) Position(row int) int64 { return b.position.Value(row) }

// Source returns the index of a row's source in the plan.
func (b *Batch) Source(row int) int { return b.source.GetValueIndex(row) }

// SourceName returns the name of a row's source.
func (b *Batch) SourceName(row int) string { return b.names.Value(b.Source(row)) }

// Epoch returns the epoch of a row's source.
func (b *Batch) Epoch(row int) int64 { return int64(b.epoch.Value(row)) }

// Window returns the number of a row's window in its source.
func (b *Batch) Window(row int) int64 { return b.window.Value(row) }

// AppendTokens appends the L+1 tokens of a row to dst.
func (b *Batch) AppendTokens(dst []uint32, row int) []uint32 {
	from, to := row*b.length, (row+1)*b.length
	if b.tokens2 != nil {
		for _, id := range b.tokens2[from:to] {
			dst = append(dst, uint32(id))
		}
		return dst
	}
	for _, id := range b.tokens4[from:to] {
		dst = append(dst, uint32(id))
	}
	return dst
}

// DocumentStarts returns the offsets in a row's window at which documents start, in ascending
// order. The slice is valid until the record is released.
func (b *Batch) DocumentStarts(row int) []int32 {
	from, to := b.starts.ValueOffsets(row)
	return b.startValues[from:to]
}

// Length returns the number of a row's tokens that are not padding: L+1 unless the plan is packed.
func (b *Batch) Length(row int) int {
	if b.lengths == nil {
		return b.length
	}
	return int(b.lengths.Value(row))
}
