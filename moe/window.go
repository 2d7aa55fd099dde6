package moe

import (
	"cmp"
	"slices"
)

// Sliding windows (https://arxiv.org/abs/2004.05150): the query at position p attends to the
// positions above p - SlidingWindow, up to its own. Some families have layers with a window and
// layers without.

// A windowKind is the layers of a family that have a window if [Config.SlidingWindow] is set.
type windowKind int

const (
	noWindows   windowKind = iota
	allLayers              // all layers, if the model has windows
	lastLayers             // all but the first MaxWindowLayers, if the model has windows
	threeOfFour            // always all but every fourth, from the fourth on
	everySecond            // always every second, from the first on
)

// The types of layers in layer_types and rope_parameters.
const (
	fullAttention    = "full_attention"
	slidingAttention = "sliding_attention"
)

// window returns the number of positions that a query of a layer attends to, its own included; 0
// means all.
func (c Config) window(layer int) int {
	switch kind := c.family().windows; {
	case kind == noWindows, kind == lastLayers && layer < c.MaxWindowLayers, kind == threeOfFour && layer%4 == 3,
		kind == everySecond && layer%2 == 1:
		return 0
	}
	return c.SlidingWindow
}

// validateWindows returns an error if the fields of windows do not fit the family.
func (c Config) validateWindows(bad func(field, format string, args ...any) error) error {
	kind := c.family().windows
	switch n := c.SlidingWindow; {
	case n < 0 || n > 1<<30:
		return bad("sliding_window", "is %d; it must be between 1 and %d, or 0 for none", n, 1<<30)
	case n > 0 && kind == noWindows:
		return bad("sliding_window", "is %d; it must be 0, because a %s model has no windows", n, c.Architecture)
	case n == 0 && (kind == threeOfFour || kind == everySecond):
		return bad("sliding_window", "is 0; it must be above 0, because a %s model has windows", c.Architecture)
	}
	switch n := c.MaxWindowLayers; {
	case n < 0 || n > maxLayers:
		return bad("max_window_layers", "is %d; it must be between 0 and %d", n, maxLayers)
	case n > 0 && (kind != lastLayers || c.SlidingWindow == 0):
		return bad("max_window_layers", "is %d; it must be 0 without windows in the last layers of a model", n)
	}
	return nil
}

// windows reads the fields of windows, and checks that layer_types has the same layers.
func (f *hfFields) windows(c *Config) {
	family := c.family()
	if family.windows == noWindows {
		if !slices.Contains(family.ignored, "sliding_window") {
			f.fixed("sliding_window", `[null]`)
		}
		f.layerTypes(c)
		return
	}
	f.known["sliding_window"] = true
	if !family.windowSwitch || f.bool("use_sliding_window") {
		c.SlidingWindow = f.slidingWindow(family.window)
	}
	if family.windows == lastLayers {
		n := cmp.Or(family.maxWindowLayers, 28)
		if f.read("max_window_layers", &n); c.SlidingWindow > 0 {
			c.MaxWindowLayers = n
		}
	}
	f.layerTypes(c)
}

// slidingWindow reads sliding_window. missing is the value of a missing field, and null means 0.
func (f *hfFields) slidingWindow(missing int) (n int) {
	if _, given := f.fields["sliding_window"]; !given {
		return missing
	}
	if f.optional("sliding_window", &n); f.set("sliding_window") && n == 0 {
		f.fail("sliding_window is 0; write null for no window")
	}
	return n
}

// layerTypes checks that layer_types names the layers with a window. Of a family with windows in
// the last layers, the list replaces max_window_layers.
func (f *hfFields) layerTypes(c *Config) {
	var types []string
	if f.optional("layer_types", &types); !f.set("layer_types") {
		return
	}
	if len(types) != c.Layers {
		f.fail("layer_types has %d entries and num_hidden_layers is %d; they must be equal", len(types), c.Layers)
		return
	}
	if c.family().windows == lastLayers && c.SlidingWindow > 0 {
		c.MaxWindowLayers = 0
		for c.MaxWindowLayers < len(types) && types[c.MaxWindowLayers] == fullAttention {
			c.MaxWindowLayers++
		}
	}
	for i, t := range types {
		want := fullAttention
		if c.window(i) > 0 {
			want = slidingAttention
		}
		if t != want {
			f.fail("layer_types is %q for layer %d; only %q is supported there", t, i, want)
			return
		}
	}
}

// windowFields sets the fields of windows in a config.json.
func (c Config) windowFields(fields map[string]any) {
	switch family := c.family(); {
	case family.windows == noWindows, family.windowSwitch && c.SlidingWindow == 0:
		return
	case c.SlidingWindow == 0:
		fields["sliding_window"] = nil
	default:
		fields["sliding_window"] = c.SlidingWindow
		if family.windowSwitch {
			fields["use_sliding_window"] = true
		}
		if family.windows == lastLayers {
			fields["max_window_layers"] = c.MaxWindowLayers
		}
	}
}
