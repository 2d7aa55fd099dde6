package moe

import (
	"crypto/sha256"
	"encoding/binary"
	"math/rand/v2"
	"strings"

	"mula/xpu"
)

// Init sets every weight to its initial value: matrices are drawn from a normal distribution of
// standard deviation InitStd, redrawn beyond InitCutoff standard deviations if that is set; norm
// weights are 1, biases and the embedding of the padding token 0.
//
// The values of a tensor depend only on seed, its name and its size, not on its address, other
// tensors or threads: its generator is math/rand/v2's PCG, seeded by the SHA-256 of seed and name.
func (m *Model) Init(seed uint64) {
	m.dev.Parallel(len(m.params), func(i int) {
		p := m.params[i]
		var buffer []float32
		weight := xpu.HostBuffer(p.Weight, &buffer)
		switch {
		case strings.HasSuffix(p.Name, ".bias"):
			clear(weight)
		case len(p.Shape) == 1:
			for j := range weight {
				weight[j] = 1
			}
		default:
			m.cfg.draw(weight, seed, p.Name)
		}
		if pad := m.cfg.PadTokenID; pad != NoToken && p.Name == embeddingName {
			clear(weight[pad*m.cfg.HiddenSize:][:m.cfg.HiddenSize])
		}
		xpu.SetNumbers(m.dev, p.Weight, weight)
	})
}

func (c Config) draw(dst []float32, seed uint64, name string) {
	var key strings.Builder
	binary.Write(&key, binary.LittleEndian, seed)
	key.WriteString(name)
	sum := sha256.Sum256([]byte(key.String()))
	r := rand.New(rand.NewPCG(binary.LittleEndian.Uint64(sum[:8]), binary.LittleEndian.Uint64(sum[8:16])))
	for i := range dst {
		v := r.NormFloat64()
		for c.InitCutoff > 0 && (v > c.InitCutoff || v < -c.InitCutoff) {
			v = r.NormFloat64()
		}
		dst[i] = float32(v * c.InitStd)
	}
}
