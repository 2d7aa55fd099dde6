package moe

import (
	"encoding/json"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"mula/moe/safetensors"
)

// The released files of gpt-oss have the matrices of experts in MXFP4, a format of the OCP
// Microscaling Formats specification 1.0 (docs/reference/models.md has a link). Unlike the matrices
// of transposed.go, they are [out, in]. Rows of gate and up alternate, the first is of gate:
//
//	gate_up_proj_blocks [E, 2I, H/32, 16]    gate_up_proj_scales [E, 2I, H/32]
//	down_proj_blocks    [E, H, I/32, 16]     down_proj_scales    [E, H, I/32]
//
// All of them are bytes. A byte of blocks has the codes of two values, the first in its lower half.
// The factor of 32 values is 2^(scale-127). float32 and bfloat16 have all these numbers below
// 2^128. Larger numbers become infinite, as in transformers.
const (
	blocksSuffix, scalesSuffix = "_blocks", "_scales"
	mxfp4Group                 = 32  // values of a scale
	mxfp4NaN                   = 255 // the scale that is no number
)

// mxfp4Values are the values of the codes: a sign, two bits of exponent, and one of fraction.
var mxfp4Values = func() (values [16]float32) {
	for i, v := range []float32{0, 0.5, 1, 1.5, 2, 3, 4, 6} {
		values[i], values[i+8] = v, -v
	}
	return values
}()

// A byteReader is a [TensorReader] that also reads tensors of type U8.
type byteReader interface {
	Bytes(dst []byte, name string, first int64) error // reads elements from element first on
}

// decodeMXFP4 stores the values of codes in dst, 32 for each scale. It returns the index of the
// first scale that is no number, or -1.
func decodeMXFP4(dst []float32, blocks, scales []byte) int {
	for g, scale := range scales {
		if scale == mxfp4NaN {
			return g
		}
		factor := math.Float32frombits(max(uint32(scale)<<23, 1<<22)) // 2^-127 is subnormal
		group := dst[g*mxfp4Group:][:mxfp4Group]
		for i, b := range blocks[g*mxfp4Group/2:][:mxfp4Group/2] {
			group[2*i], group[2*i+1] = mxfp4Values[b&15]*factor, mxfp4Values[b>>4]*factor
		}
	}
	return -1
}

// unfuseMXFP4 is [Config.unfuse] for tensors in MXFP4. Pieces count values. Only tensors of blocks
// have pieces.
func (c Config) unfuseMXFP4(t safetensors.Tensor) (pieces []piece, want []int) {
	layer, last, found := strings.Cut(t.Name, "mlp.experts.")
	if !found || !c.family().transposed {
		return nil, nil
	}
	h, ffn, e := c.HiddenSize, c.IntermediateSize, c.Experts
	name, isBlocks := strings.CutSuffix(last, blocksSuffix)
	name, isScales := strings.CutSuffix(name, scalesSuffix)
	rows, columns := h, ffn
	if name == "gate_up_proj" {
		rows, columns = 2*ffn, h
	}
	if isBlocks == isScales || name != "gate_up_proj" && name != "down_proj" || columns%mxfp4Group != 0 {
		return nil, nil
	}
	want = []int{e, rows, columns / mxfp4Group}
	if isScales {
		return nil, want
	}
	names := c.family().blockNames()
	for i := range e {
		first, row := int64(i)*int64(rows)*int64(columns), int64(columns)
		gate, up, down := names.network(names.expert(layer, i))
		if name == "down_proj" {
			pieces = append(pieces, piece{down, []int{h, ffn}, first, placing{row, 1}})
		} else {
			pieces = append(pieces, piece{gate, []int{ffn, h}, first, placing{2 * row, 1}},
				piece{up, []int{ffn, h}, first + row, placing{2 * row, 1}})
		}
	}
	return pieces, append(want, mxfp4Group/2)
}

// lackingMXFP4 returns the names of tensors of blocks without scales in the files, and of scales
// without blocks.
func lackingMXFP4(packed map[string]bool) (lacking []string) {
	for name := range packed {
		other := strings.TrimSuffix(name, scalesSuffix) + blocksSuffix
		if blocks, ok := strings.CutSuffix(name, blocksSuffix); ok {
			other = blocks + scalesSuffix
		}
		if !packed[other] {
			lacking = append(lacking, other)
		}
	}
	slices.Sort(lacking)
	return lacking
}

// eachMXFP4 is [Stored.each] for a matrix in MXFP4. It holds some rows of the stored tensor in
// memory.
func (s *Stored) eachMXFP4(t safetensors.Tensor, from source, buffer []float32, visit func([]float32) error) error {
	rows, columns, step := t.Shape[0], t.Shape[1], int(from.step)
	scalesName := strings.TrimSuffix(from.tensor, blocksSuffix) + scalesSuffix
	most := max(1, min(rows, pieceElements/step)) // rows of t
	blocks, scales := make([]byte, most*step/2), make([]byte, most*step/mxfp4Group)
	row, filled := make([]float32, columns), 0
	for r := 0; r < rows; {
		n := min(most, rows-r)
		values := (n-1)*step + columns // from the first to the last row, with the rows between them
		first := from.first + int64(r)*from.step
		if err := s.bytes.Bytes(blocks[:values/2], from.tensor, first/2); err != nil {
			return fmt.Errorf("loading weights: %w", err)
		}
		if err := s.bytes.Bytes(scales[:values/mxfp4Group], scalesName, first/mxfp4Group); err != nil {
			return fmt.Errorf("loading weights: %w", err)
		}
		for i := range n {
			at := i * step
			bad := decodeMXFP4(row, blocks[at/2:], scales[at/mxfp4Group:][:columns/mxfp4Group])
			if bad >= 0 {
				return fmt.Errorf("loading weights from %s: %s: element %d is %d, which is NaN; weights must be finite",
					s.dir, scalesName, (first+int64(at))/mxfp4Group+int64(bad), mxfp4NaN)
			}
			for rest := row; len(rest) > 0; {
				copied := copy(buffer[filled:], rest)
				rest, filled = rest[copied:], filled+copied
				if filled == len(buffer) {
					if err := visit(buffer); err != nil {
						return err
					}
					filled = 0
				}
			}
		}
		r += n
	}
	if filled > 0 {
		return visit(buffer[:filled])
	}
	return nil
}

// mxfp4Kept are the modules of gpt-oss that are never in MXFP4, as the released files name them.
var mxfp4Kept = []string{"model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"}

// quantization checks quantization_config. The names of the tensors decide which matrices are in
// MXFP4. The experts must not be among the modules that the file excludes.
func (f *hfFields) quantization() {
	const name = "quantization_config"
	if !f.set(name) {
		return
	}
	inner := &hfFields{fields: map[string]json.RawMessage{}, known: map[string]bool{}}
	f.read(name, &inner.fields)
	if _, given := inner.fields["quant_method"]; !given {
		inner.fail(`field quant_method is missing; only "mxfp4" is supported`)
	}
	inner.fixed("quant_method", `["mxfp4"]`)
	inner.fixed("dequantize", `[true, false]`)
	var kept []string
	inner.optional("modules_to_not_convert", &kept)
	for _, module := range kept {
		if !slices.Contains(mxfp4Kept, module) {
			inner.fail("modules_to_not_convert has %q; supported are %q", module, mxfp4Kept)
		}
	}
	for _, key := range slices.Sorted(maps.Keys(inner.fields)) {
		if !inner.known[key] {
			inner.fail("unknown field %s with value %s", key, shown(inner.fields[key]))
		}
	}
	for _, err := range inner.problems {
		f.fail("in %s: %w", name, err)
	}
}
