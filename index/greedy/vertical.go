package greedy

const (
	few      = 8   // groups that fit the registers of the vertical kernel
	columns  = 8   // chunks that the kernel computes side by side
	stretch  = 512 // steps between two checks for datasets that leave
	rowSteps = 8   // steps of a row: lengths are multiples of it
)

// A vertical is the state of eight chunks of a blend of at most eight datasets. The assembly
// depends on its layout.
//
// Element j of every vector belongs to chunk j, and the datasets are processed one after the other.
// There is no maximum across a vector, and the first of equal errors wins by order, so every step
// is exact.
type vertical struct {
	c     [few][columns]float64
	w     [few]float64
	t     [columns]float64         // next step
	index [few]int64               // 0, 1, …, 7
	turn  [64]uint16               // the position of element k of the transposed rows
	_     [rowSteps][columns]int64 // rows of samples, for the assembly
	_     [rowSteps][columns]int16 // rows of datasets
}

func newVertical(g *groups) *vertical {
	v := new(vertical)
	copy(v.w[:], g.weights)
	for i := range v.index {
		v.index[i] = int64(i)
	}
	for k := range v.turn {
		v.turn[k] = uint16(k&7<<3 | k>>3)
	}
	for i := g.n; i < few; i++ {
		for j := range v.c[i] {
			v.c[i][j] = gone
		}
	}
	return v
}

// descendGo makes rows·8 steps in each column. Column j writes from dataset[j·stride] and
// sample[j·stride] on.
func descendGo(v *vertical, dataset []int16, sample []int64, stride, rows int, fused, apart bool) {
	for j := range columns {
		t := v.t[j]
		for k := j * stride; k < j*stride+rows*rowSteps; k++ {
			x := max(t, 1)
			best, at := errorOf(v.w[0], x, v.c[0][j], fused && !apart), 0
			for i := 1; i < few; i++ {
				if e := errorOf(v.w[i], x, v.c[i][j], fused); e > best {
					best, at = e, i
				}
			}
			dataset[k], sample[k] = int16(at), int64(v.c[at][j])
			v.c[at][j]++
			t++
		}
		v.t[j] = t
	}
}

// leaves reports whether all samples of a dataset of column j have been taken.
func (v *vertical) leaves(g *groups, j int) bool {
	for i, limit := range g.limits {
		if v.c[i][j] >= limit && v.c[i][j] != gone {
			return true
		}
	}
	return false
}

// vertically computes a chunk of a blend of a few datasets.
func (e *engine) vertically(c *chunk) {
	g, v := e.g, e.vertical
	stride := len(c.dataset) / columns &^ (rowSteps - 1)
	if stride > 4096 {
		// Keeps the columns from starting at the same page offset, where they would compete for few
		// cache lines.
		stride -= 5 * rowSteps
	}
	for j := range columns {
		v.t[j] = float64(c.t + int64(j*stride))
		g.guess(e.from[j], c.t+int64(j*stride))
		for i := range g.n {
			v.c[i][j] = e.from[j].c[i]
		}
	}
	c.first.copyFrom(e.from[0])
	for done := 0; done < stride; {
		n := min(stretch, stride-done)
		before := v.c
		descend(v, c.dataset[done:], c.sample[done:], stride, n/rowSteps, g.fused, g.apart)
		for j := range columns {
			if v.leaves(g, j) {
				// The kernel continues to let it compete.
				now, at := e.now[j], j*stride+done
				for i := range g.n {
					now.c[i] = before[i][j]
				}
				e.alone(now, c.t+int64(at), c.dataset[at:at+n], c.sample[at:at+n])
				for i := range g.n {
					v.c[i][j] = now.c[i]
				}
			}
		}
		done += n
	}
	for j := range columns {
		begin, end := j*stride, (j+1)*stride
		now := e.now[j]
		for i := range g.n {
			now.c[i] = v.c[i][j]
		}
		if j == columns-1 {
			e.alone(now, c.t+int64(end), c.dataset[end:], c.sample[end:])
			end = len(c.dataset)
		}
		if j == 0 {
			c.last.copyFrom(now)
		} else {
			e.join(c.last, e.from[j], now, c.t+int64(begin), c.dataset[begin:end], c.sample[begin:end])
		}
	}
}

// alone continues from a state with a single lane.
func (e *engine) alone(s *state, t int64, dataset []int16, sample []int64) {
	if len(dataset) == 0 {
		return
	}
	e.lane[0].begin(s, t, dataset, sample)
	e.advance(1)
}
