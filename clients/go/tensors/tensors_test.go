package tensors_test

import (
	"errors"
	"io"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unsafe"

	"github.com/apache/arrow-go/v18/arrow"
	"github.com/apache/arrow-go/v18/arrow/array"
	"github.com/apache/arrow-go/v18/arrow/memory"
	"gorgonia.org/tensor"

	"mula/blend"
	"mula/blend/plantest"
	"mula/blend/stream"
	"mula/clients/go/tensors"
	"mula/shards"
)

func TestMain(m *testing.M) { plantest.Main(m) }

func column(t *testing.T, r arrow.RecordBatch, name string) *tensor.Dense {
	t.Helper()
	d, err := tensors.Column(r, name)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// address returns the address of an array's first number.
func address(column arrow.Array) uintptr {
	data := column.Data()
	width := data.DataType().(arrow.FixedWidthDataType).Bytes()
	return uintptr(unsafe.Pointer(unsafe.SliceData(data.Buffers()[1].Bytes()))) + uintptr(data.Offset()*width)
}

// openData builds two sources, whose documents have 2 to 7 tokens, and opens their plan.
func openData(t *testing.T, dtype shards.DType) *blend.Data {
	t.Helper()
	dir := t.TempDir()
	for k, name := range []string{"a", "b"} {
		var documents [][]uint32
		for i := range 60 {
			document := make([]uint32, 2+i%6)
			for j := range document[1:] {
				document[j] = uint32(1 + (i*31+j*7+k*500)%900)
			}
			documents = append(documents, document)
		}
		plantest.Shard(t, filepath.Join(dir, name), dtype, 1000, documents)
	}
	data := plantest.Open(t, plantest.Seal(t, dir, "plan.json", "sequence_length: 8\nsources:\n"+
		"  - {name: a, shards: [a.idx], weight: 1}\n  - {name: b, shards: [b.idx], weight: 1}\nsamples: 34\n"))
	t.Cleanup(func() { data.Close() })
	return data
}

// The tensors of a stream have the numbers of its batches, and alias the memory of the record
// batches. All memory is free after the record batches are released.
func TestStream(t *testing.T) {
	for _, dtype := range []shards.DType{shards.UInt16, shards.Int32} {
		allocator := memory.NewCheckedAllocator(memory.NewGoAllocator())
		batches, err := stream.New(t.Context(), openData(t, dtype), stream.Options{BatchSize: 4, Allocator: allocator})
		if err != nil {
			t.Fatal(err)
		}
		rows := 0
		for {
			r, err := batches.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			compareBatch(t, r)
			rows += int(r.NumRows())
			r.Release()
		}
		batches.Close()
		allocator.AssertSize(t, 0)
		if rows != 34 {
			t.Errorf("%d rows, want 34", rows)
		}
	}
}

// firstBatch returns the first record batch of a stream. It is released at the end of the test.
func firstBatch(t *testing.T, batchSize int) arrow.RecordBatch {
	t.Helper()
	batches, err := stream.New(t.Context(), openData(t, shards.UInt16), stream.Options{BatchSize: batchSize})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { batches.Close() })
	r, err := batches.Next()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Release)
	return r
}

func compareBatch(t *testing.T, r arrow.RecordBatch) {
	t.Helper()
	batch, err := stream.NewBatch(r)
	if err != nil {
		t.Fatal(err)
	}
	tokens, positions := column(t, r, "tokens"), column(t, r, "position")
	sources, epochs, windows := column(t, r, "source"), column(t, r, "epoch"), column(t, r, "window")
	starts, offsets, err := tensors.Lists(r, "document_starts")
	if err != nil {
		t.Fatal(err)
	}
	if !slices.Equal(tokens.Shape(), []int{batch.Rows(), 9}) || !slices.Equal(positions.Shape(), []int{batch.Rows()}) {
		t.Errorf("shapes %v and %v of %d rows", tokens.Shape(), positions.Shape(), batch.Rows())
	}
	for row := range batch.Rows() {
		for i, want := range batch.AppendTokens(nil, row) {
			got, err := tokens.At(row, i)
			if err != nil {
				t.Fatal(err)
			}
			if !(got == uint16(want) || got == int32(want)) {
				t.Errorf("token %d of row %d is %v, want %d", i, row, got, want)
			}
		}
		from, to := offsets.Data().([]int32)[row], offsets.Data().([]int32)[row+1]
		if got := starts.Data().([]int32)[from:to]; !slices.Equal(got, batch.DocumentStarts(row)) {
			t.Errorf("document starts of row %d are %v, want %v", row, got, batch.DocumentStarts(row))
		}
		if got := positions.Data().([]int64)[row]; got != batch.Position(row) {
			t.Errorf("position of row %d is %d, want %d", row, got, batch.Position(row))
		}
		if got := sources.Data().([]int32)[row]; int(got) != batch.Source(row) {
			t.Errorf("source of row %d is %d, want %d", row, got, batch.Source(row))
		}
		if got := epochs.Data().([]int32)[row]; int64(got) != batch.Epoch(row) {
			t.Errorf("epoch of row %d is %d, want %d", row, got, batch.Epoch(row))
		}
		if got := windows.Data().([]int64)[row]; got != batch.Window(row) {
			t.Errorf("window of row %d is %d, want %d", row, got, batch.Window(row))
		}
	}
	// An address in the record batch proves that no byte was copied.
	lists := r.Column(r.Schema().FieldIndices("document_starts")[0]).(*array.List)
	named := func(name string) arrow.Array { return r.Column(r.Schema().FieldIndices(name)[0]) }
	for _, alias := range []struct {
		name   string
		tensor *tensor.Dense
		array  arrow.Array
	}{
		{"tokens", tokens, named("tokens").(*array.FixedSizeList).ListValues()},
		{"position", positions, named("position")},
		{"source", sources, named("source").(*array.Dictionary).Indices()},
		{"epoch", epochs, named("epoch")},
		{"window", windows, named("window")},
		{"values of document_starts", starts, lists.ListValues()},
	} {
		if got, want := alias.tensor.Uintptr(), address(alias.array); got != want {
			t.Errorf("%s: the tensor is at %#x, the record batch at %#x", alias.name, got, want)
		}
	}
	if got, want := offsets.Uintptr(), uintptr(unsafe.Pointer(unsafe.SliceData(lists.Offsets()))); got != want {
		t.Errorf("offsets of document_starts: the tensor is at %#x, the record batch at %#x", got, want)
	}
}

// A tensor of a slice of a record batch has the rows of the slice.
func TestSlice(t *testing.T) {
	r := firstBatch(t, 8)
	part := r.NewSlice(3, 6)
	defer part.Release()
	whole := column(t, r, "tokens").Data().([]uint16)
	if got := column(t, part, "tokens").Data().([]uint16); !slices.Equal(got, whole[3*9:6*9]) {
		t.Errorf("tokens of rows 3 to 5 are %v", got)
	}
	if got := column(t, part, "source").Data().([]int32); !slices.Equal(got,
		column(t, r, "source").Data().([]int32)[3:6]) {
		t.Errorf("sources of rows 3 to 5 are %v", got)
	}
	values, offsets, err := tensors.Lists(part, "document_starts")
	if err != nil {
		t.Fatal(err)
	}
	allValues, allOffsets, err := tensors.Lists(r, "document_starts")
	if err != nil {
		t.Fatal(err)
	}
	for row := range 3 {
		from, to := offsets.Data().([]int32)[row], offsets.Data().([]int32)[row+1]
		first, end := allOffsets.Data().([]int32)[row+3], allOffsets.Data().([]int32)[row+4]
		if got, want := values.Data().([]int32)[from:to], allValues.Data().([]int32)[first:end]; !slices.Equal(got,
			want) {
			t.Errorf("document starts of row %d are %v, want %v", row, got, want)
		}
	}
}

// Record batches without rows, and columns that are not numbers, are refused.
func TestRefused(t *testing.T) {
	schema := arrow.NewSchema([]arrow.Field{
		{Name: "text", Type: arrow.BinaryTypes.String},
		{Name: "number", Type: arrow.PrimitiveTypes.Float32, Nullable: true},
		{Name: "lists", Type: arrow.ListOf(arrow.PrimitiveTypes.Int32)},
	}, nil)
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	defer b.Release()
	empty := b.NewRecordBatch()
	defer empty.Release()
	b.Field(0).(*array.StringBuilder).Append("a")
	b.Field(1).(*array.Float32Builder).AppendNull()
	b.Field(2).(*array.ListBuilder).Append(true)
	r := b.NewRecordBatch()
	defer r.Release()
	for _, test := range []struct {
		r          arrow.RecordBatch
		name, want string
	}{
		{r, "missing", `0 columns named "missing"`},
		{r, "text", `column "text" has type utf8`},
		{r, "number", `column "number" has 1 nulls`},
		{r, "lists", `column "lists" has type list`},
		{empty, "number", `column "number" has no rows`},
	} {
		if _, err := tensors.Column(test.r, test.name); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: error %v, want %q", test.name, err, test.want)
		}
	}
	if _, _, err := tensors.Lists(r, "number"); err == nil {
		t.Error("Lists accepts nulls")
	}
	if _, _, err := tensors.Lists(r, "text"); err == nil || !strings.Contains(err.Error(), "want lists") {
		t.Errorf("Lists accepts texts: %v", err)
	}
	if _, _, err := tensors.Lists(empty, "lists"); err == nil || !strings.Contains(err.Error(), "no rows") {
		t.Errorf("Lists accepts a record batch without rows: %v", err)
	}
	values, offsets, err := tensors.Lists(r, "lists")
	if err != nil || values != nil || !slices.Equal(offsets.Data().([]int32), []int32{0, 0}) {
		t.Errorf("an empty list has values %v, offsets %v (%v)", values, offsets, err)
	}
}

// A record batch of one row has tensors of one row, not scalars.
func TestOneRow(t *testing.T) {
	r := firstBatch(t, 1)
	if got := column(t, r, "tokens").Shape(); !slices.Equal(got, []int{1, 9}) {
		t.Errorf("tokens have the shape %v", got)
	}
	if got := column(t, r, "position"); !slices.Equal(got.Shape(), []int{1}) || got.Uintptr() != address(r.Column(0)) {
		t.Errorf("positions have the shape %v, at %#x", got.Shape(), got.Uintptr())
	}
}
