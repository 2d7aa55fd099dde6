package shards

import "fmt"

// DType is the element type of a .bin file: its code in the .idx header (megatron-core,
// indexed_dataset.DType). A [Shard] accepts only the two of the eight types that Megatron's
// preprocessing writes for text. An [Index] may have any of them.
type DType uint8

// The element types of token files.
const (
	Int32  DType = 4
	UInt16 DType = 8
)

// dtypes are the numpy names and the sizes in bytes, by code.
var dtypes = [...]struct {
	name string
	size int
}{1: {"uint8", 1}, 2: {"int8", 1}, 3: {"int16", 2}, Int32: {"int32", 4}, 5: {"int64", 8}, 6: {"float64", 8},
	7: {"float32", 4}, UInt16: {"uint16", 2}}

// Size returns the number of bytes of an element, 0 for an unknown code.
func (t DType) Size() int {
	if int(t) < len(dtypes) {
		return dtypes[t].size
	}
	return 0
}

// String returns the numpy name of the type, such as "uint16" or "int32".
func (t DType) String() string {
	if t.Size() > 0 {
		return dtypes[t].name
	}
	return fmt.Sprintf("element type %d", uint8(t))
}

func (t DType) valid() bool { return t == Int32 || t == UInt16 }

// limit returns the number of ids that the type can hold.
func (t DType) limit() int64 {
	if t == UInt16 {
		return 1 << 16
	}
	return 1 << 31
}

// DTypeFor returns the type that Megatron's preprocessing chooses for a vocabulary: uint16 below
// 65,500 ids, else int32 (megatron-core, DType.optimal_dtype).
func DTypeFor(vocabSize int) DType {
	if vocabSize < 65500 {
		return UInt16
	}
	return Int32
}
