package optimizer

import (
	"fmt"
	"math"
	"path"
	"regexp"
	"slices"
	"strings"

	"mula/internal/strictyaml"
	"mula/moe/safetensors"
)

// A ParameterGroup has optimizer settings for some of the parameters. A parameter belongs to the
// first group that matches it. A parameter without a group has the optimizer's settings.
type ParameterGroup struct {
	// classes, and patterns of Hugging Face names
	Match []string `yaml:"match" json:"match"`
	// default: the optimizer's
	WeightDecay *float64 `yaml:"weight_decay,omitempty" json:"weight_decay,omitempty"`
	// factor on the schedule's learning rate; default 1
	LearningRateScale *float64 `yaml:"learning_rate_scale,omitempty" json:"learning_rate_scale,omitempty"`
}

// The classes that are not groups of [TensorGroup].
const (
	biasesClass   = "biases"
	matricesClass = "matrices" // the matrices that Muon orthogonalizes
)

// classes lists the names of classes of parameters.
var classes = []string{embeddingGroup, headGroup, normsGroup, biasesClass, attentionGroup, routerGroup, expertsGroup,
	feedForwardGroup, matricesClass}

// isPattern reports whether an entry of match is a pattern. Names of parameters have dots, and
// names of classes have none.
func isPattern(entry string) bool { return strings.ContainsAny(entry, `.*?[\`) }

// matches reports whether a valid entry of match matches a parameter.
func matches(entry, name string, shape []int) bool {
	if isPattern(entry) {
		ok, err := path.Match(entry, name)
		return ok && err == nil
	}
	bias := strings.HasSuffix(name, ".bias")
	switch entry {
	case biasesClass:
		return bias
	case matricesClass:
		return orthogonalized(name, shape)
	}
	return TensorGroup(name) == entry && !bias
}

// GroupOf returns the number of a parameter's group, from 1, or 0 if no group matches it.
func (c Config) GroupOf(name string, shape []int) int {
	return 1 + slices.IndexFunc(c.Groups, func(g ParameterGroup) bool {
		return slices.ContainsFunc(g.Match, func(entry string) bool { return matches(entry, name, shape) })
	})
}

// A GroupSetting has the settings for updates of a group.
type GroupSetting struct{ RateScale, WeightDecay float64 }

// Settings returns the settings of the groups of a resolved configuration, by number.
func (c Config) Settings() []GroupSetting {
	all := []GroupSetting{{1, *c.WeightDecay}}
	for _, g := range c.Groups {
		s := all[0]
		if g.WeightDecay != nil {
			s.WeightDecay = *g.WeightDecay
		}
		if g.LearningRateScale != nil {
			s.RateScale = *g.LearningRateScale
		}
		all = append(all, s)
	}
	return all
}

// numbers matches the numbers of layers and experts in the name of a parameter.
var numbers = regexp.MustCompile(`\.[0-9]+\.`)

// CheckGroups returns an error if an entry of a group matches no parameter of a model with these
// tensors, or only parameters of earlier groups. A class may be empty, because not every model has
// biases, experts or weights of norms.
func (c Config) CheckGroups(tensors []safetensors.Tensor) error {
	group := make([]int, len(tensors))
	for i, t := range tensors {
		group[i] = c.GroupOf(t.Name, t.Shape)
	}
	for i, g := range c.Groups {
		if len(g.Match) == 0 {
			return &strictyaml.FieldError{Field: fmt.Sprintf("optimizer.groups[%d]", i),
				Message: " has no match; list classes (" + strings.Join(classes, ", ") +
					") or patterns of parameter names"}
		}
		for j, entry := range g.Match {
			bad := func(format string, args ...any) error {
				return &strictyaml.FieldError{Field: fmt.Sprintf("optimizer.groups[%d].match[%d]", i, j),
					Message: " is " + fmt.Sprintf(format, args...)}
			}
			if !isPattern(entry) && !slices.Contains(classes, entry) {
				return bad("%q, which is neither a class nor a pattern of parameter names%s", entry,
					strictyaml.DidYouMean(entry, classes))
			}
			if _, err := path.Match(entry, ""); err != nil {
				return bad("%q, which is not a valid pattern: %v; * matches any text, ? one character, [ab] a or b",
					entry, err)
			}
			found, left := 0, 0
			for k, t := range tensors {
				if matches(entry, t.Name, t.Shape) {
					found++
					if group[k] == i+1 {
						left++
					}
				}
			}
			if found == 0 && isPattern(entry) {
				var names []string
				for _, t := range tensors {
					name := numbers.ReplaceAllString(t.Name, ".*.")
					if !slices.Contains(names, name) {
						names = append(names, name)
					}
				}
				return bad("%q, which matches no parameter of the model%s", entry,
					strictyaml.DidYouMean(numbers.ReplaceAllString(entry, ".*."), names))
			}
			if found > 0 && left == 0 {
				return bad("%q, but earlier groups contain all parameters that it matches; move this group before "+
					"them, or remove the entry", entry)
			}
		}
	}
	return nil
}

// The groups of tensors for records of update sizes.
const (
	embeddingGroup   = "embedding"
	attentionGroup   = "attention"
	routerGroup      = "router"
	expertsGroup     = "experts"
	feedForwardGroup = "feed_forward" // of dense models
	normsGroup       = "norms"
	headGroup        = "head"
)

// TensorGroup returns the group of a tensor of the model.
func TensorGroup(name string) string {
	switch {
	case strings.Contains(name, "embed_tokens"):
		return embeddingGroup
	case strings.HasPrefix(name, "lm_head"):
		return headGroup
	case strings.Contains(name, "norm"):
		return normsGroup
	case strings.Contains(name, ".self_attn."):
		return attentionGroup
	case isRouter(name):
		return routerGroup
	case strings.Contains(name, ".experts."):
		return expertsGroup
	}
	return feedForwardGroup
}

// isRouter reports whether a tensor belongs to a router, or is the gate of shared experts.
func isRouter(name string) bool {
	return strings.HasSuffix(name, "gate.weight") || strings.Contains(name, ".mlp.router.")
}

// UpdateRatios returns the relative sizes of a measured update, by group of tensors.
func (o *Optimizer) UpdateRatios(tensors []safetensors.Tensor) map[string]float64 {
	update, weight := map[string]float64{}, map[string]float64{}
	switch {
	case !o.measured:
		return map[string]float64{}
	case o.sharding.ReducesSums:
		for i, group := range classes {
			update[group], weight[group] = o.groupUpdates[i], o.groupWeights[i]
		}
	default:
		for i, t := range tensors {
			u, w := o.Ratio(i)
			group := TensorGroup(t.Name)
			update[group] += u * u
			weight[group] += w * w
		}
	}
	ratios := map[string]float64{}
	for group, w := range weight {
		if r := math.Sqrt(update[group] / w); isFinite(r) {
			ratios[group] = r
		}
	}
	return ratios
}
