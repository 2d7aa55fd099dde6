package optimizer

import (
	"slices"
	"strings"
	"testing"

	"mula/train/optimizer/optimizertest"
	"mula/xpu"
	"mula/xpu/discrete"
)

// The moments of all parameters lie beside each other in memory of the device, however it is cut.
func TestStateApart(t *testing.T) {
	for i, most := range []int{0, 1, 1000, 100_000, stateChunk, 1, 1000, stateChunk} {
		dtype := xpu.Float32
		if i > 4 {
			dtype = xpu.BFloat16
		}
		d := discrete.New(device(t, 1))
		o := &Optimizer{device: d, parameters: optimizertest.Parameters(1)}
		o.sharding = newSingleSharding(d, o.parameters)
		o.spec, o.rule = specs[AdamW], newAdamW(defaultOptimizer(AdamW))
		o.divide(defaultOptimizer(AdamW))
		if err := o.makeState(most, dtype); err != nil {
			t.Fatal(err)
		}
		var all []xpu.Tensor
		for i, p := range o.parameters {
			for k := range 2 {
				all = append(all, o.state[i][k].Values)
				if got := o.state[i][k].Values.DType(); got != dtype {
					t.Errorf("moments of %s, want %s", got, dtype)
				}
				if moments, weights := o.state[i][k].Values.Elements(), p.Weight.Elements(); moments != weights {
					t.Errorf("most %d: %d moments of %d weights", most, moments, weights)
				}
			}
		}
		for i, x := range all {
			d.Write(x, slices.Repeat([]float32{float32(i + 1)}, x.Elements()))
		}
		for i, tensor := range all {
			x := make([]float32, tensor.Elements())
			if err := d.Read(t.Context(), x, tensor); err != nil {
				t.Fatal(err)
			}
			if slices.Min(x) != float32(i+1) || slices.Max(x) != float32(i+1) {
				t.Errorf("most %d: tensor %d has numbers of another", most, i)
			}
		}
		if pieces := len(o.memory); most <= 1 && pieces != len(o.parameters) || most == stateChunk && pieces != 1 {
			t.Errorf("most %d: %d pieces of memory", most, pieces)
		}
		if o.Free(); d.InUse() != 0 {
			t.Errorf("most %d: %d bytes are not given back", most, d.InUse())
		}
	}
	d := discrete.New(device(t, 1))
	d.SetCapacity(1000)
	if _, err := New(defaultOptimizer(AdamW), 1, d, optimizertest.Parameters(1)); err == nil ||
		!strings.Contains(err.Error(), "memory for the optimizer: ") || d.InUse() != 0 {
		t.Errorf("without room: %v, %d bytes in use", err, d.InUse())
	}
}
