// Package foreign has the training states of other frameworks: weights, moments of AdamW, and
// progress. Its sub-packages read the checkpoints of one framework each.
package foreign

import (
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

// Moments are the kinds of values of AdamW's state under their names in files.
var Moments = map[string]Kind{"exp_avg": ExpAvg, "exp_avg_sq": ExpAvgSq}

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
