// Package fingerprint hashes the samples of a run. It writes, reads and compares logs of these
// hashes, so that two runs prove that they consumed the same batches.
//
// docs/formats/fingerprints.md specifies the hashes and the logs.
package fingerprint

import (
	"crypto/sha256"
	"encoding"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"hash"
	"math/bits"
	"unsafe"
)

// SampleHash is the hash of a sample: the first 16 bytes of the SHA-256 of its token ids as
// little-endian uint32.
func SampleHash(tokens []uint32) [16]byte {
	// mula runs on little-endian machines, so the ids in memory are these bytes.
	sum := sha256.Sum256(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(tokens))), 4*len(tokens)))
	return [16]byte(sum[:16])
}

// A SetHash is the sum of sample hashes as little-endian 128-bit numbers, modulo 2^128. It does not
// depend on the order of the samples. The sum of the ranks' SetHashes is the step's SetHash. Its
// text form is 32 hexadecimal digits, first byte first.
type SetHash [16]byte

// Add adds the hash of a sample, or the SetHash of another rank.
func (h *SetHash) Add(o [16]byte) {
	low, carry := bits.Add64(binary.LittleEndian.Uint64(h[:8]), binary.LittleEndian.Uint64(o[:8]), 0)
	high, _ := bits.Add64(binary.LittleEndian.Uint64(h[8:]), binary.LittleEndian.Uint64(o[8:]), carry)
	binary.LittleEndian.PutUint64(h[:8], low)
	binary.LittleEndian.PutUint64(h[8:], high)
}

// MarshalText returns the text form.
func (h SetHash) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, h[:]), nil }

// UnmarshalText parses the text form.
func (h *SetHash) UnmarshalText(text []byte) error { return decodeHash(h[:], text) }

// An OrderHash is the SHA-256 over the sample hashes of a step in the order of their positions. Its
// text form is 64 hexadecimal digits.
type OrderHash [32]byte

// MarshalText returns the text form.
func (h OrderHash) MarshalText() ([]byte, error) { return hex.AppendEncode(nil, h[:]), nil }

// UnmarshalText parses the text form.
func (h *OrderHash) UnmarshalText(text []byte) error { return decodeHash(h[:], text) }

func decodeHash(dst, text []byte) error {
	if len(text) != 2*len(dst) {
		return fmt.Errorf("a hash of %d characters, want %d hexadecimal digits", len(text), 2*len(dst))
	}
	_, err := hex.Decode(dst, text)
	return err
}

// A StepHash is the fingerprint of one step: a line of a fingerprint log.
type StepHash struct {
	Step    int64 `json:"step"`    // number of the step, from 0
	First   int64 `json:"first"`   // first position of the step
	Samples int64 `json:"samples"` // number in the step, or in this rank's part, without skipped positions
	// nil if unknown, as in a step combined from the logs of several ranks
	Order *OrderHash `json:"order,omitempty"`
	Set   SetHash    `json:"set"`
}

// A Hasher computes the StepHash of consecutive steps. The zero Hasher is ready for use.
type Hasher struct {
	order   hash.Hash
	set     SetHash
	samples int64
}

// Add adds the next sample of the step.
func (h *Hasher) Add(tokens []uint32) { h.AddHash(SampleHash(tokens)) }

// AddHash adds the next sample of the step by its SampleHash, for samples that another rank read.
func (h *Hasher) AddHash(sum [16]byte) {
	if h.order == nil {
		h.order = sha256.New()
	}
	h.order.Write(sum[:])
	h.set.Add(sum)
	h.samples++
}

// HasherBytes is the length of the state of a [Hasher]: the sum, the number of samples, and the
// state of a SHA-256.
const HasherBytes = len(SetHash{}) + 8 + 108

// AppendBinary appends the state of the hasher to b, so that another rank can continue with the
// next samples of the step.
func (h *Hasher) AppendBinary(b []byte) ([]byte, error) {
	if h.order == nil {
		h.order = sha256.New()
	}
	b = append(b, h.set[:]...)
	b = binary.LittleEndian.AppendUint64(b, uint64(h.samples))
	return h.order.(encoding.BinaryAppender).AppendBinary(b)
}

// UnmarshalBinary sets the state of the hasher to a state that AppendBinary has written.
func (h *Hasher) UnmarshalBinary(state []byte) error {
	if len(state) != HasherBytes {
		return fmt.Errorf("the state of a hasher has %d bytes, want %d", len(state), HasherBytes)
	}
	h.order = sha256.New()
	h.set, h.samples = SetHash(state), int64(binary.LittleEndian.Uint64(state[len(h.set):]))
	return h.order.(encoding.BinaryUnmarshaler).UnmarshalBinary(state[len(h.set)+8:])
}

// Step ends a step, returns its hashes, and resets the hasher for the next step.
func (h *Hasher) Step(step, first int64) StepHash {
	if h.order == nil {
		h.order = sha256.New()
	}
	s := StepHash{Step: step, First: first, Samples: h.samples, Order: new(OrderHash), Set: h.set}
	h.order.Sum(s.Order[:0])
	h.order.Reset()
	h.set, h.samples = SetHash{}, 0
	return s
}
