package moe

import (
	"fmt"
	"strings"

	"mula/moe/safetensors"
)

// Files of gpt-oss have four tensors for the experts of a layer. Their matrices are [in, out], and
// columns of gate and up alternate, the first is of gate:
//
//	gate_up_proj [E, H, 2I]    gate_up_proj_bias [E, 2I]
//	down_proj    [E, I, H]     down_proj_bias    [E, H]
//
// In the model, and in mula's own checkpoints, each expert has six tensors, as in other families.

// A placing is the order of a tensor's elements in a stored tensor: element (r, c) of the matrix is
// element c·line + r·step from the tensor's first element on. A vector is a matrix of one column.
// The zero value is the order of the tensor itself, row by row.
type placing struct{ step, line int64 }

// unfuseTransposed divides a tensor of fused experts, whose name is the beginning of a layer's
// names, "mlp.experts." and last; see unfuse.
func (c Config) unfuseTransposed(layer, last string) (pieces []piece, want []int) {
	h, ffn, e := c.HiddenSize, c.IntermediateSize, c.Experts
	height, width := int64(h), int64(ffn)
	names := c.family().blockNames()
	add := func(name string, first int64, p placing, shape ...int) {
		pieces = append(pieces, piece{name, shape, first, p})
	}
	for i := range e {
		at, prefix := int64(i), names.expert(layer, i)
		gate, up, down := names.network(prefix)
		gateBias, upBias, downBias := names.biases(prefix)
		switch last {
		case "gate_up_proj":
			want = []int{e, h, 2 * ffn}
			add(gate, at*height*2*width, placing{2, 2 * width}, ffn, h)
			add(up, at*height*2*width+1, placing{2, 2 * width}, ffn, h)
		case "gate_up_proj_bias":
			want = []int{e, 2 * ffn}
			add(gateBias, at*2*width, placing{2, 2 * width}, ffn)
			add(upBias, at*2*width+1, placing{2, 2 * width}, ffn)
		case "down_proj":
			want = []int{e, ffn, h}
			add(down, at*height*width, placing{1, height}, h, ffn)
		case "down_proj_bias":
			want = []int{e, h}
			add(downBias, at*height, placing{1, height}, h)
		}
	}
	return pieces, want
}

// eachPlaced is [Stored.each] for a tensor whose elements are not in their order. It holds the
// tensor in memory, and some lines of the stored tensor.
func (s *Stored) eachPlaced(t safetensors.Tensor, from source, buffer []float32, visit func([]float32) error) error {
	n := int(t.Elements())
	values := buffer[:min(n, len(buffer))]
	if len(values) < n {
		values = make([]float32, n)
	}
	columns := n / t.Shape[0]
	offset := from.first % from.line
	block := make([]float32, max(1, min(columns, pieceElements/int(from.line)))*int(from.line))
	for c := 0; c < columns; {
		lines := block[:min(len(block), (columns-c)*int(from.line))]
		if err := s.files.Float32(lines, from.tensor, from.first-offset+int64(c)*from.line); err != nil {
			return fmt.Errorf("loading weights: %w", err)
		}
		for ; len(lines) > 0; lines, c = lines[from.line:], c+1 {
			for r := range t.Shape[0] {
				values[r*columns+c] = lines[offset+int64(r)*from.step]
			}
		}
	}
	for len(values) > 0 {
		piece := values[:min(len(values), len(buffer))]
		if err := visit(piece); err != nil {
			return err
		}
		values = values[len(piece):]
	}
	return nil
}

// transposedFiles returns the tensors in the files of a model whose experts have this form.
func (c Config) transposedFiles() (list []FusedTensor) {
	tensors := c.Tensors()
	for i := 0; i < len(tensors); i += len(list[len(list)-1].Parts) {
		t := FusedTensor{Name: tensors[i].Name, Shape: tensors[i].Shape, Parts: []int{i}}
		layer, last, _ := strings.Cut(t.Name, "mlp.experts.")
		for _, fused := range []struct{ first, name string }{{"0.gate_proj.weight", "gate_up_proj"},
			{"0.gate_proj.bias", "gate_up_proj_bias"}, {"0.down_proj.weight", "down_proj"},
			{"0.down_proj.bias", "down_proj_bias"}} {
			if last == fused.first {
				t.Name = layer + "mlp.experts." + fused.name
				t.pieces, t.Shape = c.unfuseTransposed(layer, fused.name)
				for n := 1; n < len(t.pieces); n++ { // they follow, see tensorList.biasedExperts
					t.Parts = append(t.Parts, i+n)
				}
			}
		}
		list = append(list, t)
	}
	return list
}

// write writes the tensor. fill passes the i-th tensor of the model to a function, in one or more
// chunks. If the parts do not follow one another, it writes the tensor expert by expert.
func (t FusedTensor) write(fill func(i int, write func([]float32) error) error,
	write func([]float32) error) error {
	if t.pieces == nil {
		for _, part := range t.Parts {
			if err := fill(part, write); err != nil {
				return err
			}
		}
		return nil
	}
	each := int64(columns(t.Shape)) // elements of an expert
	values := make([]float32, each)
	for i, p := range t.pieces {
		columns, at := columns(p.shape), 0 // the next element of the piece
		err := fill(t.Parts[i], func(chunk []float32) error {
			for _, v := range chunk {
				values[p.first%each+int64(at%columns)*p.line+int64(at/columns)*p.step] = v
				at++
			}
			return nil
		})
		if err != nil {
			return err
		}
		if i+1 == len(t.pieces) || t.pieces[i+1].first/each > p.first/each {
			if err := write(values); err != nil {
				return err
			}
		}
	}
	return nil
}
