package moe

import (
	"crypto/sha256"
	"encoding/binary"
	"math/rand/v2"
	"strings"

	"mula/internal/freelist"
	"mula/xpu"
)

// Init sets every weight to its initial value: matrices are drawn from a normal distribution of
// standard deviation InitStd, redrawn beyond InitCutoff standard deviations if that is set; norm
// weights are 1, biases and the embedding of the padding token 0. Sinks and biases of routers are
// drawn like matrices.
//
// The values of a tensor depend only on seed, its name and its size, not on its address, other
// tensors or threads: its generator is math/rand/v2's PCG, seeded by the SHA-256 of seed and name.
func (m *Model) Init(seed uint64) {
	var buffers freelist.List[[]float32]
	m.dev.Parallel(len(m.params), func(i int) {
		p, buffer := m.params[i], buffers.Get()
		defer buffers.Put(buffer)
		set := func(weights xpu.Tensor, values func(dst []float32)) {
			dst := xpu.HostBuffer(weights, buffer)
			values(dst)
			xpu.SetNumbers(m.dev, weights, dst)
		}
		initial := m.cfg.initial(p, seed)
		if p.Slice.Ranks > 0 {
			set(p.Weight, func(dst []float32) {
				whole := p.Slice.Whole(p.Shape)
				n := elements(whole)
				piece := make([]float32, min(initElements, n))
				for first := 0; first < n; first += len(piece) {
					piece = piece[:min(len(piece), n-first)]
					initial(piece)
					p.Slice.Take(dst, piece, first, whole)
				}
			})
			return
		}
		all := p.Weight.Flat()
		for begin, n := 0, all.Elements(); begin < n; begin += initElements {
			set(all.Rows(begin, min(begin+initElements, n)), initial)
		}
		if pad := m.cfg.PadTokenID; pad != NoToken && p.Name == embeddingName {
			set(p.Weight.Index(pad), func(dst []float32) { clear(dst) })
		}
	})
}

// initElements is the number of weights that Init computes at once, if it cannot write to the
// weights' memory.
const initElements = 1 << 16

// initial returns a function that computes the next initial values of a parameter.
func (c Config) initial(p *Parameter, seed uint64) func(dst []float32) {
	switch {
	case strings.HasSuffix(p.Name, sinksName), strings.HasSuffix(p.Name, "."+c.family().blockNames().router+".bias"):
		return c.normal(namedRandom(seed, p.Name))
	case strings.HasSuffix(p.Name, ".bias"), !Trained(p.Name):
		return func(dst []float32) { clear(dst) }
	case len(p.Shape) == 1:
		return func(dst []float32) {
			for i := range dst {
				dst[i] = 1
			}
		}
	}
	return c.normal(namedRandom(seed, p.Name))
}

// normal returns a function that draws the next weights of a matrix.
func (c Config) normal(r *rand.Rand) func(dst []float32) {
	return func(dst []float32) {
		for i := range dst {
			v := r.NormFloat64()
			for c.InitCutoff > 0 && (v > c.InitCutoff || v < -c.InitCutoff) {
				v = r.NormFloat64()
			}
			dst[i] = float32(v * c.InitStd)
		}
	}
}

// namedRandom returns the random numbers of a tensor: math/rand/v2's PCG, seeded by the SHA-256 of
// seed and name.
func namedRandom(seed uint64, name string) *rand.Rand {
	var key strings.Builder
	binary.Write(&key, binary.LittleEndian, seed)
	key.WriteString(name)
	sum := sha256.Sum256([]byte(key.String()))
	return rand.New(rand.NewPCG(binary.LittleEndian.Uint64(sum[:8]), binary.LittleEndian.Uint64(sum[8:16])))
}
