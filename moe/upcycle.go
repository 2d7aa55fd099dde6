package moe

import (
	"context"
	"fmt"
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"
)

// An Upcycling is the way in which the feed-forward networks of a dense model become experts.
//
// The experts of a layer are Experts/Granularity copies of the layer's network. A copy consists of
// Granularity consecutive experts: each has an equal range of the intermediate elements, and its
// down projection is multiplied by Granularity. The router's rows are drawn, and all experts of a
// copy have the same row. A token therefore uses complete copies, its renormalised routing weights
// add up to 1, and the model computes the function of the dense model.
//
// Sources: https://arxiv.org/abs/2212.05055 (copies), https://arxiv.org/abs/2410.07524 (groups of
// equal rows for fine-grained experts), https://arxiv.org/abs/2502.19261 (weights drawn again).
type Upcycling struct {
	Experts         int // of a layer; a multiple of Granularity
	ExpertsPerToken int // a multiple of Granularity
	Granularity     int // experts of a copy; a power of 2 that divides the network's width

	// Reinitialize is the fraction of each expert's intermediate elements whose weights are drawn
	// again. They are normally distributed, with the mean and the standard deviation of the weights
	// that they replace. With 0, the model computes the function of the dense model.
	Reinitialize float64

	Seed uint64 // of all random numbers
}

// Upcycled returns the configuration of the mixture of experts that u makes from a dense model of
// configuration c.
func (c Config) Upcycled(u Upcycling) (Config, error) {
	to := c.family().upcycled
	width := c.IntermediateSize
	switch {
	case c.moe():
		return c, fmt.Errorf("the model is %s, which has experts; only a dense model can be upcycled", c.Architecture)
	case to == "":
		return c, fmt.Errorf("no supported mixture of experts has the attention and the norms of %s; only %s can be "+
			"upcycled", c.Architecture, strings.Join(upcycledFamilies(), ", "))
	case u.Granularity < 1 || bits.OnesCount(uint(u.Granularity)) != 1 || width%u.Granularity != 0:
		return c, fmt.Errorf("granularity is %d; it must be a power of 2 that divides intermediate_size %d",
			u.Granularity, width)
	case u.Experts < 1 || u.Experts > maxExperts || u.Experts%u.Granularity != 0:
		return c, fmt.Errorf("experts is %d; it must be a multiple of granularity %d, up to %d", u.Experts,
			u.Granularity, maxExperts)
	case u.ExpertsPerToken < 1 || u.ExpertsPerToken > u.Experts || u.ExpertsPerToken%u.Granularity != 0:
		return c, fmt.Errorf("top_k is %d; it must be a multiple of granularity %d, up to experts %d",
			u.ExpertsPerToken, u.Granularity, u.Experts)
	case !(u.Reinitialize >= 0 && u.Reinitialize <= 1):
		return c, fmt.Errorf("reinitialize is %g; it must be between 0 and 1", u.Reinitialize)
	}
	c.Architecture, c.NormTopK = to, true
	c.Experts, c.ExpertsPerToken, c.IntermediateSize = u.Experts, u.ExpertsPerToken, width/u.Granularity
	c.RouterAuxLossCoef = c.family().auxCoef
	if err := c.Validate(); err != nil {
		return c, fmt.Errorf("as %s: %w", to, err)
	}
	return c, nil
}

// upcycledFamilies lists the dense families that can be upcycled, sorted by name.
func upcycledFamilies() (names []string) {
	for _, name := range architectures() {
		if families[name].upcycled != "" {
			names = append(names, string(name))
		}
	}
	return names
}

// SaveUpcycled writes the mixture of experts that u makes from the dense model, as [Stored.Save]
// writes a stored model. It holds one matrix of the dense network and one of an expert in memory.
func (s *Stored) SaveUpcycled(ctx context.Context, u Upcycling, dir string, opts SaveOptions,
	visit func(tensor string, piece []float32) error) error {
	c, err := s.config.Upcycled(u)
	if err != nil {
		return err
	}
	making := upcycling{Upcycling: u, dense: s, config: c, experts: map[string]expertMatrix{}, stored: map[string]int{}}
	making.list()
	buffer := make([]float32, pieceElements)
	tensors := c.Tensors()
	return saveDirectory(dir, c, opts, func(i int, write func([]float32) error) error {
		name := tensors[i].Name
		return making.tensor(name, buffer, func(piece []float32) error {
			if err := ctx.Err(); err != nil {
				return err
			}
			if err := visit(name, piece); err != nil {
				return err
			}
			return write(piece)
		})
	}, savedPredictions{})
}

// An upcycling is the state of [Stored.SaveUpcycled].
type upcycling struct {
	Upcycling
	dense   *Stored
	config  Config
	experts map[string]expertMatrix // by the names of their tensors
	stored  map[string]int          // the numbers of the dense model's tensors
	matrix  []float32               // of an expert

	down     []float32 // latest down projection of the dense network, from which experts have columns
	downName string    // of its tensor
}

// An expertMatrix is a matrix of an expert: the weights of some intermediate elements in a matrix
// of the dense network.
type expertMatrix struct {
	expert string // the beginning of its tensors' names
	dense  string // tensor of the dense network
	down   bool   // intermediate elements are columns; otherwise they are rows
	first  int    // intermediate element
}

// list finds the origin of all tensors.
func (u *upcycling) list() {
	for i, t := range u.dense.tensors {
		u.stored[t.Name] = i
	}
	names, from := u.config.family().blockNames(), u.dense.config.family().blockNames()
	for l := range u.config.Layers {
		layer := layerPrefix(l)
		gate, up, down := from.network(layer + from.block + ".")
		for e := range u.Experts {
			expert, first := names.expert(layer, e), e%u.Granularity*u.config.IntermediateSize
			toGate, toUp, toDown := names.network(expert)
			u.experts[toGate] = expertMatrix{expert, gate, false, first}
			u.experts[toUp] = expertMatrix{expert, up, false, first}
			u.experts[toDown] = expertMatrix{expert, down, true, first}
		}
	}
}

// tensor computes a tensor of the mixture of experts and passes it to visit in chunks.
func (u *upcycling) tensor(name string, buffer []float32, visit func([]float32) error) error {
	if m, ok := u.experts[name]; ok {
		if err := u.expert(m, name); err != nil {
			return err
		}
		return visit(u.matrix)
	}
	if i, ok := u.stored[name]; ok {
		return u.dense.each(i, buffer, visit)
	}
	return visit(u.router(name))
}

// expert computes a matrix of an expert.
func (u *upcycling) expert(m expertMatrix, name string) error {
	h, width := u.config.HiddenSize, u.config.IntermediateSize
	from := u.dense.sources[u.stored[m.dense]]
	read := func(dst []float32, first int) error {
		if err := u.dense.files.Float32(dst, from.tensor, from.first+int64(first)); err != nil {
			return fmt.Errorf("loading weights: %w", err)
		}
		return nil
	}
	room(&u.matrix, width*h)
	drawn := namedRandom(u.Seed, m.expert).Perm(width)[:int(math.RoundToEven(u.Reinitialize*float64(width)))]
	slices.Sort(drawn)
	random := namedRandom(u.Seed, name)
	if !m.down {
		if err := read(u.matrix, m.first*h); err != nil {
			return err
		}
		redraw(u.matrix, drawn, h, 1, h, random)
		return nil
	}
	all := u.dense.config.IntermediateSize
	if u.downName != m.dense {
		if err := read(room(&u.down, h*all), 0); err != nil {
			return err
		}
		u.downName = m.dense
	}
	for row := range h {
		copy(u.matrix[row*width:][:width], u.down[row*all+m.first:])
	}
	for i := range u.matrix {
		u.matrix[i] *= float32(u.Granularity)
	}
	redraw(u.matrix, drawn, 1, width, h, random)
	return nil
}

// redraw replaces the weights of some elements by normally distributed numbers of the same mean and
// standard deviation. Element i has the n weights from i·stride at distances of step.
func redraw(matrix []float32, elements []int, stride, step, n int, random *rand.Rand) {
	each := func(visit func(weight *float32)) {
		for _, i := range elements {
			for j := range n {
				visit(&matrix[i*stride+j*step])
			}
		}
	}
	count := float64(len(elements) * n)
	var sum, squares float64
	each(func(w *float32) { sum += float64(*w) })
	mean := sum / count
	each(func(w *float32) { squares += (float64(*w) - mean) * (float64(*w) - mean) })
	deviation := math.Sqrt(squares / count)
	each(func(w *float32) { *w = float32(mean + deviation*random.NormFloat64()) })
}

// router returns the weights of a router: a row for each copy, drawn as in [Model.Init], which all
// experts of the copy have.
func (u *upcycling) router(name string) []float32 {
	rows := make([]float32, u.Experts/u.Granularity*u.config.HiddenSize)
	u.config.normal(namedRandom(u.Seed, name))(rows)
	all := make([]float32, 0, len(rows)*u.Granularity)
	for row := range slices.Chunk(rows, u.config.HiddenSize) {
		for range u.Granularity {
			all = append(all, row...)
		}
	}
	return all
}
