// Package foreign has the training states that checkpoints of other frameworks have: weights,
// moments of AdamW, and progress. Its sub-packages read and write the checkpoints of one framework
// each.
package foreign

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"mula/internal/pickle"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/moe/torchfile"
)

// A Kind is a kind of values that a training state has for each weight.
type Kind int

// The kinds of values.
const (
	Weights  Kind = iota // float32 masters, if the weights themselves have another type
	ExpAvg               // AdamW's average of gradients
	ExpAvgSq             // AdamW's average of squared gradients
)

// Names has the names of the kinds of values in the files of DeepSpeed. mula has the same names for
// the moments.
var Names = [3]string{Weights: "fp32", ExpAvg: "exp_avg", ExpAvgSq: "exp_avg_sq"}

// A Parameter is a tensor of weights, with the same tensor of moments.
type Parameter struct {
	Name  string // of Hugging Face
	Shape []int

	// Read reads len(dst) values from element first on.
	Read func(kind Kind, dst []float32, first int64) error
}

// A State is the training state in a checkpoint. Its files are open only while they are read.
type State struct {
	Form string // of the checkpoint, such as "DeepSpeed ZeRO stage 3, 8 ranks"
	Dir  string

	Step     int64  // steps done
	Updates  int64  // updates of AdamW
	Samples  int64  // sequences read; -1 if unknown
	Settings string // of the optimizer, as a phrase; "" if unknown

	Parameters []Parameter
	NoMoments  error // why moments cannot be read; nil: they can
}

// Elements returns the number of elements of the tensor.
func (p Parameter) Elements() int64 {
	n := int64(1)
	for _, d := range p.Shape {
		n *= int64(d)
	}
	return n
}

// chunkElements is the number of elements that Each reads at a time.
const chunkElements = 1 << 18

// Each reads n values of a kind from element first of a parameter on, and passes them to visit in
// chunks, which are valid until visit returns. A value that is not finite is an error.
func (s *State) Each(ctx context.Context, p Parameter, kind Kind, first, n int64, visit func([]float32) error) error {
	buffer := make([]float32, min(n, chunkElements))
	for n > 0 {
		chunk := buffer[:min(n, chunkElements)]
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := p.Read(kind, chunk, first); err != nil {
			return err
		}
		if err := moe.CheckFinite(s.Dir, p.Name+"."+Names[kind], first, chunk); err != nil {
			return err
		}
		if err := visit(chunk); err != nil {
			return err
		}
		first, n = first+int64(len(chunk)), n-int64(len(chunk))
	}
	return nil
}

// Settings describes settings of an optimizer, by their names in its groups of parameters.
func Settings(groups []pickle.Value, names ...string) string {
	var parts []string
	for _, name := range names {
		var values []string
		for _, item := range groups {
			d, ok := item.(*pickle.Dict)
			if !ok {
				continue
			}
			v, ok := d.Get(name)
			text := fmt.Sprint(v)
			if ok && !slices.Contains(values, text) {
				values = append(values, text)
			}
		}
		if values != nil {
			parts = append(parts, name+" "+strings.Join(values, " and "))
		}
	}
	return strings.Join(parts, ", ")
}

// Count returns an optimizer's number of updates, a number or a tensor of one number.
func Count(step pickle.Value) (int64, error) {
	switch v := step.(type) {
	case int64:
		if v >= 0 {
			return v, nil
		}
	case float64:
		if v >= 0 && v < 1<<53 {
			return int64(v), nil
		}
	case *torchfile.Tensor:
		n, err := v.Number()
		if err != nil {
			return 0, err
		}
		return Count(n)
	}
	return 0, errors.New("step is missing or not a number")
}

// Stored returns the values of a kind as a stored model of configuration c. The error lists every
// tensor that is missing, wrong or unknown. It need not be closed.
func (s *State) Stored(c moe.Config, kind Kind) (*moe.Stored, error) {
	r := reader{s, kind, map[string]int{}}
	for i, p := range s.Parameters {
		r.byName[p.Name] = i
	}
	return moe.NewStored(s.Dir, c, r)
}

// A reader reads the values of one kind.
type reader struct {
	state  *State
	kind   Kind
	byName map[string]int
}

func (r reader) Tensors() []safetensors.Tensor {
	var list []safetensors.Tensor
	for _, p := range r.state.Parameters {
		list = append(list, safetensors.Tensor{Name: p.Name, DType: safetensors.F32, Shape: p.Shape})
	}
	return list
}

func (r reader) Float32(dst []float32, name string, first int64) error {
	i, ok := r.byName[name]
	if !ok {
		return fmt.Errorf("%s has no tensor %q", r.state.Dir, name)
	}
	return r.state.Parameters[i].Read(r.kind, dst, first)
}

func (r reader) Close() error { return nil }

// Fused returns the state with the parameters that the model of configuration c has in transformers
// 5, see [moe.Config.Fused]. s has the parameters of [moe.Config.Tensors].
func (s *State) Fused(c moe.Config) *State {
	fused := *s
	fused.Parameters = nil
	for _, t := range c.Fused() {
		p := Parameter{Name: t.Name, Shape: t.Shape}
		p.Read = func(kind Kind, dst []float32, first int64) error {
			for _, i := range t.Parts {
				part := s.Parameters[i]
				if first >= part.Elements() {
					first -= part.Elements()
					continue
				}
				n := min(int64(len(dst)), part.Elements()-first)
				if err := part.Read(kind, dst[:n], first); err != nil {
					return err
				}
				dst, first = dst[n:], 0
				if len(dst) == 0 {
					break
				}
			}
			return nil
		}
		fused.Parameters = append(fused.Parameters, p)
	}
	return &fused
}
