package shards

import "fmt"

// DType is the element type of a .bin file, by its code in the .idx header. Of Megatron's eight codes only the two that its
// preprocessing writes for text are token ids here; a shard of another type is refused by name.
type DType uint8

// The element types of token files.
const (
	Int32  DType = 4
	UInt16 DType = 8
)

// The codes of megatron-core's DType, for messages about the ones that are not read.
var dtypeNames = [...]string{1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}

// Size is the number of bytes of one token.
func (t DType) Size() int {
	if t == UInt16 {
		return 2
	}
	return 4
}

// String is the type's name in numpy, "uint16" or "int32".
func (t DType) String() string {
	if int(t) < len(dtypeNames) && dtypeNames[t] != "" {
		return dtypeNames[t]
	}
	return fmt.Sprintf("element type %d", uint8(t))
}

func (t DType) valid() bool { return t == Int32 || t == UInt16 }

// limit is the number of ids that the type can hold.
func (t DType) limit() int64 {
	if t == UInt16 {
		return 1 << 16
	}
	return 1 << 31
}

// DTypeFor is the type that Megatron's preprocessing chooses for a vocabulary: uint16 below 65,500 ids, else int32
// (megatron-core, DType.optimal_dtype).
func DTypeFor(vocabSize int) DType {
	if vocabSize < 65500 {
		return UInt16
	}
	return Int32
}
