package shards

import (
	"fmt"
	"slices"
	"strings"
)

// DType is the element type of ids in a file, by its numpy name. Elements are little-endian.
type DType string

// The element types. A [Shard] has UInt16 or Int32, which Megatron's preprocessing writes for text.
// An [Index] may be of any file of Megatron-LM, and have any type with a code ([DType.Code]).
const (
	UInt8   DType = "uint8"
	UInt16  DType = "uint16"
	UInt32  DType = "uint32"
	UInt64  DType = "uint64"
	Int8    DType = "int8"
	Int16   DType = "int16"
	Int32   DType = "int32"
	Int64   DType = "int64"
	Float32 DType = "float32"
	Float64 DType = "float64"
)

// idTypes are the types of ids in bare arrays and in manifests.
var idTypes = []DType{UInt8, UInt16, UInt32, Int32}

// IDTypes lists the names that [ParseDType] accepts.
func IDTypes() (names []string) {
	for _, t := range idTypes {
		names = append(names, string(t))
	}
	return names
}

// ParseDType returns the unsigned type that reads the ids of an array with the named type. For
// int32 it returns UInt32, because ids are never negative.
func ParseDType(name string) (DType, error) {
	if t := DType(name); slices.Contains(idTypes, t) {
		return Unsigned(t.Size()), nil
	}
	return "", fmt.Errorf("ids cannot be %q; element types are %s", name, strings.Join(IDTypes(), ", "))
}

// Unsigned returns the unsigned type with elements of size bytes, "" if no type has this size.
func Unsigned(size int) DType {
	switch size {
	case 1:
		return UInt8
	case 2:
		return UInt16
	case 4:
		return UInt32
	case 8:
		return UInt64
	}
	return ""
}

// SmallestDType returns the first of types, which are in ascending order, that holds all ids of a
// vocabulary. It returns the last type if no type does, and for an unknown vocabulary, 0.
func SmallestDType(vocabSize int, types ...DType) DType {
	for _, t := range types {
		if vocabSize > 0 && int64(vocabSize) <= t.IDs() {
			return t
		}
	}
	return types[len(types)-1]
}

// DTypeFor returns the type that Megatron's preprocessing chooses for a vocabulary: uint16 below
// 65,500 ids, else int32 (megatron-core, DType.optimal_dtype).
func DTypeFor(vocabSize int) DType {
	if vocabSize < 65500 {
		return UInt16
	}
	return Int32
}

// Size returns the number of bytes of an element, 0 for an unknown type.
func (t DType) Size() int {
	switch t {
	case UInt8, Int8:
		return 1
	case UInt16, Int16:
		return 2
	case UInt32, Int32, Float32:
		return 4
	case UInt64, Int64, Float64:
		return 8
	}
	return 0
}

// signed reports whether the type is a signed integer.
func (t DType) signed() bool { return t == Int8 || t == Int16 || t == Int32 || t == Int64 }

// IDs returns the number of ids that a type of integers can hold, at most 2^32.
func (t DType) IDs() int64 {
	bits := 8 * t.Size()
	if t.signed() {
		bits--
	}
	return 1 << min(bits, 32)
}

// codes are the types by their code in the header of an .idx file (megatron-core,
// indexed_dataset.DType).
var codes = [...]DType{1: UInt8, 2: Int8, 3: Int16, 4: Int32, 5: Int64, 6: Float64, 7: Float32, 8: UInt16}

// Code returns the code of the type in the header of an .idx file, 0 if it has none.
func (t DType) Code() byte { return byte(max(0, slices.Index(codes[:], t))) }

// DTypeOf returns the type with a code in the header of an .idx file. Its size is 0 for an unknown
// code.
func DTypeOf(code byte) DType {
	if code > 0 && int(code) < len(codes) {
		return codes[code]
	}
	return DType(fmt.Sprintf("element type %d", code))
}

// megatron reports whether a [Shard] can have the type.
func (t DType) megatron() bool { return t == UInt16 || t == Int32 }
