package moe

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"strings"

	"mula/xpu"
)

// routerParts describes how the routers of a family score and choose experts; see
// [xpu.RouterKind].
type routerParts struct {
	sigmoid bool // scores are sigmoids of the logits instead of their softmax
	bias    bool // correction biases; see [Model.UpdateBiases]
	outBias bool // the projection to logits has a bias
	groups  groupKind
	scaled  bool // has the field routed_scaling_factor
	statics bool // files have correction biases as a matrix of one row in another place than the router's weights
	float32 bool // files of every type have the routers' weights as float32

	leastSum float32 // least divisor of renormalised routing weights
}

// A groupKind is the value of a group of experts.
type groupKind int

const (
	noGroups groupKind = iota
	largest            // the largest score; see DeepSeek-V2
	sumOfTwo           // the sum of the two largest scores plus biases; see DeepSeek-V3
)

// routerBias is the end of the name of a layer's correction biases.
const routerBias = ".e_score_correction_bias"

// isRouter reports whether a tensor has the weights of a router.
func (f *family) isRouter(name string) bool {
	names := f.blockNames()
	return strings.HasSuffix(name, "."+names.block+"."+names.router+".weight")
}

// biasName returns the place of correction biases in a layer's feed-forward block.
func (r routerParts) biasName() string {
	if r.statics {
		return ".moe_statics" + routerBias
	}
	return ".gate" + routerBias
}

// biasShape returns the shape of correction biases in files.
func (r routerParts) biasShape(experts int) []int {
	if r.statics {
		return []int{1, experts}
	}
	return []int{experts}
}

// alwaysFloat32 reports whether files of every type have a tensor as float32.
func (c Config) alwaysFloat32(name string) bool {
	return !Trained(name) || c.family().router.float32 && c.family().isRouter(name)
}

// Trained reports whether a tensor of a model has a gradient, and an optimizer updates it. The
// correction biases of routers have none; see [Model.UpdateBiases].
func Trained(name string) bool { return !strings.HasSuffix(name, routerBias) }

// HasBiases reports whether the routers have correction biases.
func (c Config) HasBiases() bool { return c.family().router.bias }

// HasSigmoidRouter reports whether the routers' scores are sigmoids. They have no z-loss.
func (c Config) HasSigmoidRouter() bool { return c.family().router.sigmoid }

// routerKind returns the kind of the routers, without biases.
func (c Config) routerKind() xpu.RouterKind {
	r := c.family().router
	return xpu.RouterKind{Sigmoid: r.sigmoid, Groups: c.Groups, TopGroups: c.TopGroups, SumOfTwo: r.groups == sumOfTwo,
		Renormalize: c.NormTopK, LeastSum: r.leastSum, Scale: float32(c.RoutingScale)}
}

// validateRouter returns an error if the fields of routers do not fit the family.
func (c Config) validateRouter(bad func(field, format string, args ...any) error) error {
	r := c.family().router
	switch s := c.RoutingScale; {
	case s != 0 && !r.scaled:
		return bad("routed_scaling_factor", "is %g; it must be 0, because a %s model does not scale routing weights", s,
			c.Architecture)
	case !(s >= 0) || math.IsInf(float64(float32(s)), 0) || s > 0 && float32(s) == 0:
		return bad("routed_scaling_factor", "is %g; it must be positive, or 0 for 1", s)
	case c.Groups == 0 && c.TopGroups != 0:
		return bad("topk_group", "is %d; it must be 0 without n_group", c.TopGroups)
	case c.Groups == 0:
		return nil
	case r.groups == noGroups:
		return bad("n_group", "is %d; it must be 0, because a %s model has no groups of experts", c.Groups,
			c.Architecture)
	case c.Groups < 2 || c.Experts%c.Groups != 0:
		return bad("n_group", "is %d; it must be at least 2 and divide the %d experts, or be 0 for none", c.Groups,
			c.Experts)
	case r.groups == sumOfTwo && c.Experts/c.Groups < 2:
		return bad("n_group", "is %d; a group needs at least two of the %d experts", c.Groups, c.Experts)
	case c.TopGroups < 1 || c.TopGroups > c.Groups:
		return bad("topk_group", "is %d; it must be between 1 and n_group %d", c.TopGroups, c.Groups)
	case c.TopGroups*(c.Experts/c.Groups) < c.ExpertsPerToken:
		return bad("topk_group", "is %d; groups of %d experts are less than num_experts_per_tok %d", c.TopGroups,
			c.Experts/c.Groups, c.ExpertsPerToken)
	}
	return nil
}

// router reads the fields of routers.
func (f *hfFields) router(c *Config) {
	family := c.family()
	r := family.router
	if r.scaled {
		f.read("routed_scaling_factor", &c.RoutingScale)
		if f.set("routed_scaling_factor") && c.RoutingScale == 0 {
			f.fail("routed_scaling_factor is 0; it must be positive")
		} else if !f.set("routed_scaling_factor") {
			c.RoutingScale = cmp.Or(family.routingScale, 1)
		}
		if c.RoutingScale == 1 {
			c.RoutingScale = 0
		}
	}
	if r.groups == noGroups {
		return
	}
	c.Groups, c.TopGroups = family.groups, family.topGroups
	limited := true
	if r.groups == largest {
		method := "greedy"
		f.fixed("topk_method", `["greedy", "group_limited_greedy"]`)
		f.optional("topk_method", &method)
		limited = method == "group_limited_greedy"
		f.optional("n_group", &c.Groups)
		f.optional("topk_group", &c.TopGroups)
	} else {
		f.read("n_group", &c.Groups)
		f.read("topk_group", &c.TopGroups)
	}
	switch {
	case limited && (c.Groups < 1 || c.TopGroups < 1 || c.Groups == 1 && c.TopGroups > 1):
		f.fail("n_group is %d and topk_group %d; both must be at least 1, and topk_group at most n_group", c.Groups,
			c.TopGroups)
	case !limited || c.Groups == 1:
		c.Groups, c.TopGroups = 0, 0
	}
}

// routerFields sets the fields of routers in a config.json.
func (c Config) routerFields(fields map[string]any) {
	r := c.family().router
	if r.scaled {
		fields["routed_scaling_factor"] = fraction(cmp.Or(c.RoutingScale, 1))
	}
	groups, top := max(1, c.Groups), max(1, c.TopGroups)
	switch r.groups {
	case largest:
		if fields["topk_method"] = "greedy"; c.Groups > 0 {
			fields["topk_method"] = "group_limited_greedy"
		}
		fields["n_group"], fields["topk_group"] = groups, top
	case sumOfTwo:
		fields["n_group"], fields["topk_group"] = groups, top
	}
}

// Biases lists the correction biases of this model's routers, one Parameter for each layer with
// experts, without gradients. They are numbers of Float32 at every precision. [Model.Init] sets
// them to zero.
func (m *Model) Biases() (list []*Parameter) {
	for _, p := range m.params {
		if !Trained(p.Name) {
			list = append(list, p)
		}
	}
	return list
}

// UpdateBiases updates the correction biases of routers without a gradient
// (https://arxiv.org/abs/2408.15664, algorithm 1; https://arxiv.org/abs/2412.19437, section 2.1.2):
// the bias of an expert grows by speed if fewer tokens of the step chose it than the mean of its
// layer's experts, and shrinks by speed if more did. counts [M][E] are the choices of all tokens of
// the step, over all ranks, for the layers with experts that this model holds. Equal counts give
// equal bits on all ranks.
func (m *Model) UpdateBiases(ctx context.Context, counts [][]int64, speed float64) error {
	if !m.biases.Present() {
		return nil
	}
	layers, experts := m.biases.Dim(0), m.biases.Dim(1)
	if len(counts) != layers {
		return fmt.Errorf("counts of %d layers for the correction biases of %d layers", len(counts), layers)
	}
	bias := make([]float32, layers*experts)
	if err := m.dev.Read(ctx, bias, m.biases); err != nil {
		return fmt.Errorf("reading correction biases: %w", err)
	}
	for l, layer := range counts {
		total := int64(0)
		for _, n := range layer {
			total += n
		}
		for e, n := range layer {
			switch mean := n * int64(experts); {
			case mean < total:
				bias[l*experts+e] += float32(speed)
			case mean > total:
				bias[l*experts+e] -= float32(speed)
			}
		}
	}
	m.dev.Write(m.biases, bias)
	return nil
}
