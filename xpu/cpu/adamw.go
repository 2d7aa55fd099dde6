package cpu

import "math"

// AdamW holds the constants of one step of Adam with decoupled weight decay (Loshchilov and Hutter 2019, arXiv 1711.05101) in the form of
// PyTorch's torch.optim.AdamW.
type AdamW struct {
	LearningRate float64
	Beta1, Beta2 float64
	Epsilon      float64
	WeightDecay  float64
	Step         int64   // the number of this update, from 1: it corrects the bias of the moments
	GradScale    float64 // multiplies the gradient first: 1, or what clipping its norm asks for
}

// adamwConstants is what an update needs for all elements, in the order in which the assembly reads it.
type adamwConstants struct {
	gradScale, beta1, beta2, rest1, rest2, decay, rate, root, epsilon float32
}

// Update carries out the step on weights w with gradient grad; m and v are their first and second moments. All have the length of w, or
// Update panics; they must not overlap. For every element, on its own:
//
//	g = GradScale·grad
//	m = β1·m + (1-β1)·g
//	v = β2·v + (1-β2)·g²
//	w = (1-LearningRate·WeightDecay)·w - LearningRate/(1-β1^Step)·m / (√v/√(1-β2^Step) + ε)
//
// A moment or weight below 2^-126 in magnitude becomes 0.
func (o AdamW) Update(w, grad, m, v []float32) {
	sameLength(len(w), len(grad), len(m), len(v))
	step := float64(o.Step)
	k := adamwConstants{
		gradScale: float32(o.GradScale),
		beta1:     float32(o.Beta1), beta2: float32(o.Beta2),
		rest1: float32(1 - o.Beta1), rest2: float32(1 - o.Beta2),
		decay:   float32(1 - o.LearningRate*o.WeightDecay),
		rate:    float32(o.LearningRate / (1 - math.Pow(o.Beta1, step))),
		root:    float32(1 / math.Sqrt(1-math.Pow(o.Beta2, step))),
		epsilon: float32(o.Epsilon),
	}
	n := len(w) &^ 15
	if n > 0 {
		adamw(w[:n], grad[:n], m[:n], v[:n], &k)
	}
	if n < len(w) {
		var x [4][16]float32
		for i, s := range [][]float32{w, grad, m, v} {
			copy(x[i][:], s[n:])
		}
		adamw(x[0][:], x[1][:], x[2][:], x[3][:], &k)
		for i, s := range [][]float32{w, nil, m, v} {
			if s != nil {
				copy(s[n:], x[i][:])
			}
		}
	}
}

// adamwGo does the operations of the assembly, each rounded by itself (see multiplyGo for the conversions).
func adamwGo(w, grad, m, v []float32, k *adamwConstants) {
	grad, m, v = grad[:len(w)], m[:len(w)], v[:len(w)]
	for i, g := range grad {
		g = float32(g * k.gradScale)
		a := normal(float32(k.rest1*g) + float32(k.beta1*m[i]))
		q := normal(float32(k.rest2*float32(g*g)) + float32(k.beta2*v[i]))
		m[i], v[i] = a, q
		root := float32(math.Sqrt(float64(q)))
		w[i] = normal(float32(k.decay*w[i]) - float32(k.rate*a)/(float32(k.root*root)+k.epsilon))
	}
}

// normal is x, or 0 if x is too small for a normal number.
func normal(x float32) float32 {
	if x > -0x1p-126 && x < 0x1p-126 {
		return 0
	}
	return x
}
