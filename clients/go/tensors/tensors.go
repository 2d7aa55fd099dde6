// Package tensors views the record batches of a stream as tensors of gorgonia.org/tensor, without a
// copy.
//
// A tensor aliases the memory of its record batch. It is valid until the record batch is released:
// the reader of a stream releases each record batch when no tensor of it is in use, or calls Retain
// first to keep it longer. A tensor itself needs no release. Arrow memory is immutable, so do not
// write to the tensors, and pass no tensor as the result of an operation.
package tensors

import (
	"fmt"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"gorgonia.org/tensor"
)

// Column returns a view of a column of a record batch. The shape is [rows], or [rows, n] for a
// column of lists of n numbers, such as the tokens of [mula/blend/stream.Stream]. The tensor of a
// dictionary, such as the sources of a stream, has the indices into the dictionary.
//
// Column fails for a column of another type, such as document_starts, whose rows differ in length:
// see [Lists]. It also fails if the record batch has no rows, because gorgonia has no empty
// tensors, and if the column has nulls.
func Column(r arrow.RecordBatch, name string) (*tensor.Dense, error) {
	column, err := find(r, name)
	if err != nil {
		return nil, err
	}
	if r.NumRows() == 0 {
		return nil, fmt.Errorf("tensors: column %q has no rows, and gorgonia has no empty tensors", name)
	}
	shape := []int{column.Len()}
	switch c := column.(type) {
	case *array.FixedSizeList:
		n := int(c.DataType().(*arrow.FixedSizeListType).Len())
		values := array.NewSlice(c.ListValues(), int64(c.Offset()*n), int64((c.Offset()+c.Len())*n))
		defer values.Release() // r still has a reference to the memory
		column, shape = values, append(shape, n)
	case *array.Dictionary:
		column = c.Indices()
	}
	numbers, err := numbersOf(column, name)
	if err != nil {
		return nil, err
	}
	return tensor.New(tensor.WithShape(shape...), tensor.WithBacking(numbers)), nil
}

// Lists returns views of a column of lists of different lengths, such as document_starts of
// [mula/blend/stream.Stream]. The list of row i is values[offsets[i]:offsets[i+1]]. values is nil if there
// are no values at all.
func Lists(r arrow.RecordBatch, name string) (values, offsets *tensor.Dense, err error) {
	column, err := find(r, name)
	if err != nil {
		return nil, nil, err
	}
	lists, ok := column.(*array.List)
	if !ok {
		return nil, nil, fmt.Errorf("tensors: column %q has type %s, want lists of different lengths", name,
			column.DataType())
	}
	if r.NumRows() == 0 {
		return nil, nil, fmt.Errorf("tensors: column %q has no rows, and gorgonia has no empty tensors", name)
	}
	ends := lists.Offsets()[lists.Offset() : lists.Offset()+lists.Len()+1]
	offsets = tensor.New(tensor.WithShape(len(ends)), tensor.WithBacking(ends))
	if lists.ListValues().Len() == 0 {
		return nil, offsets, nil
	}
	numbers, err := numbersOf(lists.ListValues(), name)
	if err != nil {
		return nil, nil, err
	}
	return tensor.New(tensor.WithShape(lists.ListValues().Len()), tensor.WithBacking(numbers)), offsets, nil
}

// find returns the column with this name. It fails if the column has nulls.
func find(r arrow.RecordBatch, name string) (arrow.Array, error) {
	columns := r.Schema().FieldIndices(name)
	if len(columns) != 1 {
		return nil, fmt.Errorf("tensors: the record batch has %d columns named %q, want 1; it has %s", len(columns),
			name, r.Schema())
	}
	column := r.Column(columns[0])
	if column.NullN() > 0 {
		return nil, fmt.Errorf("tensors: column %q has %d nulls, and tensors have none", name, column.NullN())
	}
	return column, nil
}

// numbersOf returns the numbers of a column, as a slice that aliases the column's memory.
func numbersOf(column arrow.Array, name string) (any, error) {
	switch c := column.(type) {
	case *array.Uint8:
		return c.Values(), nil
	case *array.Uint16:
		return c.Values(), nil
	case *array.Uint32:
		return c.Values(), nil
	case *array.Uint64:
		return c.Values(), nil
	case *array.Int8:
		return c.Values(), nil
	case *array.Int16:
		return c.Values(), nil
	case *array.Int32:
		return c.Values(), nil
	case *array.Int64:
		return c.Values(), nil
	case *array.Float32:
		return c.Values(), nil
	case *array.Float64:
		return c.Values(), nil
	}
	return nil, fmt.Errorf("tensors: column %q has type %s, which is not a type of numbers", name, column.DataType())
}
