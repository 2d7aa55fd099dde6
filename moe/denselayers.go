package moe

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Some models with experts have layers without: instead of a router and experts, such a layer has
// the feed-forward network of a dense model, of width [Config.DenseSize].

// A LayerSet is a set of layers: ranges of numbers from 0, in ascending order, such as "0-2,5". The
// zero value is empty.
type LayerSet string

// layerSet returns the set of the layers below n that in names.
func layerSet(n int, in func(layer int) bool) LayerSet {
	var ranges []string
	for l := 0; l < n; l++ {
		first := l
		for l < n && in(l) {
			l++
		}
		switch l - first {
		case 0:
		case 1:
			ranges = append(ranges, strconv.Itoa(first))
		default:
			ranges = append(ranges, fmt.Sprintf("%d-%d", first, l-1))
		}
	}
	return LayerSet(strings.Join(ranges, ","))
}

// each calls visit for every range of the set, with its first and its last layer.
func (s LayerSet) each(visit func(first, last int)) error {
	if s == "" {
		return nil
	}
	before := -1
	for part := range strings.SplitSeq(string(s), ",") {
		from, to, isRange := strings.Cut(part, "-")
		if !isRange {
			to = from
		}
		first, err := strconv.Atoi(from)
		last, err2 := strconv.Atoi(to)
		if err != nil || err2 != nil || first <= before || last < first {
			return fmt.Errorf("is %q; it must have ranges of layers in ascending order, such as 0-2,5", s)
		}
		before = last
		visit(first, last)
	}
	return nil
}

// Has reports whether a valid set has a layer.
func (s LayerSet) Has(layer int) (has bool) {
	s.each(func(first, last int) { has = has || first <= layer && layer <= last })
	return has
}

// HasExperts reports whether a layer has a router and experts.
func (c Config) HasExperts(layer int) bool { return c.moe() && !c.DenseLayers.Has(layer) }

// ExpertLayers returns the layers with experts among the layers [from, to), in ascending order.
func (c Config) ExpertLayers(from, to int) (layers []int) {
	for l := from; l < to; l++ {
		if c.HasExperts(l) {
			layers = append(layers, l)
		}
	}
	return layers
}

// denseWidth returns the width of the network of a layer without experts, 0 if the model has none.
func (c Config) denseWidth() int {
	if !c.moe() {
		return c.IntermediateSize
	}
	return c.DenseSize
}

// ActiveWidth returns the number of intermediate elements that a token uses in the feed-forward
// block of a layer.
func (c Config) ActiveWidth(layer int) int {
	if c.HasExperts(layer) {
		return c.ExpertsPerToken*c.IntermediateSize + c.SharedSize
	}
	return c.denseWidth()
}

// validateDense returns an error if the fields of layers without experts do not fit the family.
func (c Config) validateDense(bad func(field, format string, args ...any) error) error {
	if c.DenseLayers == "" {
		if c.DenseSize != 0 {
			return bad("dense_intermediate_size", "is %d; it must be 0 without dense_layers", c.DenseSize)
		}
		return nil
	}
	kind := c.family().dense
	if kind == noDenseLayers {
		return bad("dense_layers", "is %q; it must be empty, because a %s model has layers of one kind", c.DenseLayers,
			c.Architecture)
	}
	most, layers := 0, 0
	if err := c.DenseLayers.each(func(first, last int) { most, layers = last, layers+last-first+1 }); err != nil {
		return bad("dense_layers", "%v", err)
	}
	canonical := layerSet(min(most+1, maxLayers), c.DenseLayers.Has)
	_, _, _, named := c.expertRange()
	switch {
	case most >= c.Layers:
		return bad("dense_layers", "has layer %d; it must be below num_hidden_layers %d", most, c.Layers)
	case canonical != c.DenseLayers:
		return bad("dense_layers", "is %q; write %q", c.DenseLayers, canonical)
	case layers == c.Layers:
		return bad("dense_layers", "has all %d layers; at least one layer must have experts", layers)
	case kind == layerRange && !named:
		return bad("dense_layers", "is %q; in a %s model, every n-th layer of a range has experts, and n divides "+
			"the number of such a layer plus 1", c.DenseLayers, c.Architecture)
	case kind == firstLayers && most != layers-1:
		return bad("dense_layers", "is %q; a %s model can have dense layers at its start only", c.DenseLayers,
			c.Architecture)
	case c.DenseSize < 1 || c.DenseSize > maxWidth:
		return bad("dense_intermediate_size", "is %d; it must be between 1 and %d with dense_layers", c.DenseSize,
			maxWidth)
	}
	return nil
}

// A denseKind is the way in which the config.json of a family names its layers without experts.
type denseKind int

const (
	noDenseLayers denseKind = iota // it has none
	sparseSteps                    // decoder_sparse_step and mlp_only_layers
	firstLayers                    // first_k_dense_replace
	layerRange                     // moe_layer_start_index, moe_layer_end_index and moe_layer_interval
)

// expertRange returns the first and the last layer with experts, and the interval: the layers l
// between them have experts if l + 1 is a multiple of it. ok is false if the layers with experts do
// not have this form.
func (c Config) expertRange() (first, last, interval int, ok bool) {
	layers := c.ExpertLayers(0, c.Layers)
	if len(layers) == 0 {
		return 0, 0, 0, false
	}
	first, last, interval = layers[0], layers[len(layers)-1], 1
	if len(layers) > 1 {
		interval = layers[1] - first
	}
	for l := first; l <= last; l++ {
		if ((l+1)%interval == 0) != c.HasExperts(l) {
			return first, last, interval, false
		}
	}
	return first, last, interval, true
}

// denseLayers reads the layers without experts, and their width, which is intermediate_size.
func (f *hfFields) denseLayers(c *Config) {
	dense := func(int) bool { return false }
	switch family := c.family(); family.dense {
	case noDenseLayers:
		return
	case sparseSteps:
		step, only := 1, []int(nil)
		f.read("decoder_sparse_step", &step)
		f.optional("mlp_only_layers", &only)
		if step < 1 {
			f.fail("decoder_sparse_step is %d; it must be at least 1", step)
			return
		}
		for _, l := range only {
			if l < 0 || l >= c.Layers {
				f.fail("mlp_only_layers has %d; a layer must be between 0 and %d", l, c.Layers-1)
				return
			}
		}
		dense = func(l int) bool { return (l+1)%step != 0 || slices.Contains(only, l) }
		f.someExperts(c, dense, fmt.Sprintf("decoder_sparse_step %d and mlp_only_layers %v leave", step, only))
	case firstLayers:
		first := family.firstDense
		if f.read("first_k_dense_replace", &first); first < 0 {
			f.fail("first_k_dense_replace is %d; it must not be negative", first)
			return
		}
		dense = func(l int) bool { return l < first }
		f.someExperts(c, dense, fmt.Sprintf("first_k_dense_replace %d leaves", first))
	case layerRange:
		first, last, interval := 1, -1, 1
		f.read("moe_layer_start_index", &first)
		f.read("moe_layer_end_index", &last)
		if f.read("moe_layer_interval", &interval); interval < 1 {
			f.fail("moe_layer_interval is %d; it must be at least 1", interval)
			return
		}
		if last == -1 {
			last = c.Layers - 1
		}
		dense = func(l int) bool { return (l+1)%interval != 0 || l < first || l > last }
		f.someExperts(c, dense, fmt.Sprintf("moe_layer_start_index %d, moe_layer_end_index %d and "+
			"moe_layer_interval %d leave", first, last, interval))
	}
	f.known["intermediate_size"] = true
	if c.DenseLayers = layerSet(min(c.Layers, maxLayers), dense); c.DenseLayers != "" {
		c.DenseSize = f.size("intermediate_size")
	}
}

// someExperts checks that a layer has experts.
func (f *hfFields) someExperts(c *Config, dense func(l int) bool, leaves string) {
	for l := range min(c.Layers, maxLayers) {
		if !dense(l) {
			return
		}
	}
	f.fail("%s no layer with experts; use a dense model_type", leaves)
}

// denseFields sets the fields of layers without experts in a config.json.
func (c Config) denseFields(fields map[string]any) {
	kind := c.family().dense
	if c.DenseLayers != "" {
		fields["intermediate_size"] = c.DenseSize
	}
	switch {
	case kind == sparseSteps && c.DenseLayers != "":
		var only []int
		for l := range c.Layers {
			if c.DenseLayers.Has(l) {
				only = append(only, l)
			}
		}
		fields["decoder_sparse_step"], fields["mlp_only_layers"] = 1, only
	case kind == layerRange:
		first, last, interval, _ := c.expertRange()
		fields["moe_layer_start_index"], fields["moe_layer_end_index"] = first, last
		fields["moe_layer_interval"] = interval
	case kind == firstLayers:
		fields["first_k_dense_replace"] = c.Layers - len(c.ExpertLayers(0, c.Layers))
	}
}
