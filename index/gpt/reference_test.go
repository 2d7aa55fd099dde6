package gpt

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"slices"
)

// A second implementation of the rules, as plain as possible: complete arrays, epochs by repeated
// addition, the sample index by a walk over the documents. It shares no code with the package and
// with index/numpy. It panics where Megatron-LM fails.

type twister struct {
	state [624]uint32
	next  int
}

func newTwister(seed uint32) *twister {
	t := &twister{next: 624}
	t.state[0] = seed
	for i := 1; i < 624; i++ {
		t.state[i] = 1812433253*(t.state[i-1]^t.state[i-1]>>30) + uint32(i)
	}
	return t
}

func (t *twister) draw() uint32 {
	if t.next == 624 {
		for i := range t.state {
			y := t.state[i]&0x80000000 | t.state[(i+1)%624]&0x7fffffff
			t.state[i] = t.state[(i+397)%624] ^ y>>1
			if y%2 == 1 {
				t.state[i] ^= 0x9908b0df
			}
		}
		t.next = 0
	}
	y := t.state[t.next]
	t.next++
	y ^= y >> 11
	y ^= y << 7 & 0x9d2c5680
	y ^= y << 15 & 0xefc60000
	return y ^ y>>18
}

func (t *twister) shuffle(a []int64) {
	for i := len(a) - 1; i > 0; i-- {
		mask := uint32(1)
		for mask < uint32(i) {
			mask = mask<<1 | 1
		}
		v := t.draw() & mask
		for v > uint32(i) {
			v = t.draw() & mask
		}
		a[i], a[v] = a[v], a[i]
	}
}

type reference struct{ documents, samples, shuffle []byte }

// upstreamFails is the panic of a build that Megatron-LM ends by an assertion.
const upstreamFails = "upstream fails"

func build(d *Dataset) reference {
	var lengths []int64
	for i := 0; i < len(d.Lengths); i += 4 {
		lengths = append(lengths, int64(int32(binary.LittleEndian.Uint32(d.Lengths[i:]))))
	}
	x := int64(0)
	if d.ExtraToken {
		x = 1
	}
	s := d.SequenceLength
	tokens := int64(0)
	for _, length := range lengths[d.First:d.End] {
		tokens += length
	}
	epochs := int64(1)
	if d.Samples >= 0 {
		for have := tokens; have < d.Samples*s+x; have += tokens {
			epochs++
		}
	}
	if d.Epochs > 0 {
		epochs = d.Epochs
	}
	separate := false
	sans := ((epochs-1)*tokens - x) / s
	if epochs > 1 {
		last := d.Samples - sans
		per := (tokens - x) / s
		if last < 0 || last > per+1 {
			panic(upstreamFails)
		}
		separate = last < int64(0.80*float64(per))
	}

	random := newTwister(d.Seed)
	list := func(epochs int64) []int64 {
		var a []int64
		for range epochs {
			for id := d.First; id < d.End; id++ {
				a = append(a, id)
			}
		}
		random.shuffle(a)
		return a
	}
	var documents []int64
	if separate {
		documents = append(list(epochs-1), list(1)...)
	} else {
		documents = list(epochs)
	}

	samples := (epochs*tokens - x) / s
	if d.KeepPartial {
		samples = int64(math.Ceil(float64(float32(epochs*tokens-x) / float32(s))))
	}
	table := [][2]int64{{0, 0}}
	position, offset := int64(0), int64(0)
	for int64(len(table)) <= samples {
		for remaining := s + x; remaining != 0; {
			length := lengths[documents[position]] - offset
			remaining -= length
			if remaining <= 0 {
				offset += remaining + length - x
				break
			}
			if position == int64(len(documents)-1) {
				offset = lengths[documents[position]] - x
				break
			}
			position++
			offset = 0
		}
		table = append(table, [2]int64{position, offset})
	}

	sequence := func(from, to int64) []int64 {
		var a []int64
		for i := from; i < to; i++ {
			a = append(a, i)
		}
		random.shuffle(a)
		return a
	}
	var shuffled []int64
	if separate {
		shuffled = append(sequence(0, sans), sequence(sans, samples)...)
	} else {
		shuffled = sequence(0, samples)
	}

	var flat []int64
	for _, row := range table {
		flat = append(flat, row[0], row[1])
	}
	sampleType := "<i4"
	if d.SampleType == Int64 {
		sampleType = "<i8"
	} else if d.CheckOffsets && slices.Min(flat) < 0 {
		panic(upstreamFails)
	}
	return reference{
		documents: npy("<i4", fmt.Sprintf("(%d,)", len(documents)), documents),
		samples:   npy(sampleType, fmt.Sprintf("(%d, 2)", len(table)), flat),
		shuffle:   npy("<u4", fmt.Sprintf("(%d,)", len(shuffled)), shuffled),
	}
}

func npy(descr, shape string, values []int64) []byte {
	var b bytes.Buffer
	b.WriteString("\x93NUMPY\x01\x00\x76\x00")
	fmt.Fprintf(&b, "%-117s\n", fmt.Sprintf("{'descr': '%s', 'fortran_order': False, 'shape': %s, }", descr, shape))
	for _, v := range values {
		if descr == "<i8" {
			b.Write(binary.LittleEndian.AppendUint64(nil, uint64(v)))
		} else {
			b.Write(binary.LittleEndian.AppendUint32(nil, uint32(v)))
		}
	}
	return b.Bytes()
}
