package opencl

import (
	"context"
	_ "embed"
	"fmt"
	"time"
)

//go:embed probe.cl
var probeText string

// Rates are the rates of mula's kernels on a device: fp32 in plain OpenCL C, without
// vendor-specific instructions. The device's peak rates are higher.
type Rates struct {
	Copy    float64 // bytes read and written per second
	Product float64 // FLOPs of a matrix product per second
	Kernel  string  // the faster kernel for products: product_registers or product_shared
}

// Probe measures the device with its own clock, for about the given time, plus the time to compile
// and run each kernel once. It checks the results. Wrong results, or no result before ctx ends, are
// an error.
func (d *Device) Probe(ctx context.Context, limit time.Duration, cache *Cache) (Rates, error) {
	rates, err := d.probe(ctx, limit, cache)
	if err != nil {
		return Rates{}, fmt.Errorf("measuring %s: %w", d, err)
	}
	return rates, nil
}

// A prober is the state of a probe.
type prober struct {
	ctx     context.Context
	context *Context
	queue   *Queue
	kernels map[string]*Kernel
}

func (d *Device) probe(ctx context.Context, limit time.Duration, cache *Cache) (Rates, error) {
	var rates Rates
	c, err := NewContext(d)
	if err != nil {
		return rates, err
	}
	defer c.Release()
	q, err := c.NewQueue(true)
	if err != nil {
		return rates, err
	}
	defer q.Release()
	program, err := c.Build(ctx, Source{Name: "probe.cl", Text: probeText}, cache)
	if err != nil {
		return rates, err
	}
	defer program.Release()
	p := &prober{ctx, c, q, map[string]*Kernel{}}
	for _, name := range []string{"pattern", "copy", "product_registers", "product_shared"} {
		k, err := program.Kernel(name)
		if err != nil {
			return rates, err
		}
		defer k.Release()
		p.kernels[name] = k
	}
	if rates.Copy, err = p.copies(limit / 4); err != nil {
		return rates, err
	}
	for _, product := range []struct {
		kernel        string
		rows, columns int // elements of C per work-item
		local         []int
	}{
		{"product_registers", 8, 16, []int{8, 8}},
		{"product_shared", 4, 4, []int{16, 16}},
	} {
		if product.local[0]*product.local[1] > p.kernels[product.kernel].limit {
			continue // the other kernel needs less
		}
		rate, err := p.products(limit*3/8, product.kernel, product.rows, product.columns, product.local)
		if err != nil {
			return rates, err
		}
		if rate > rates.Product {
			rates.Product, rates.Kernel = rate, product.kernel
		}
	}
	return rates, nil
}

// run runs a kernel, and returns its running time.
func (p *prober) run(kernel string, global, local []int, args ...Argument) (time.Duration, error) {
	e, err := p.queue.LaunchEvent(p.kernels[kernel], global, local, args...)
	if err != nil {
		return 0, err
	}
	defer e.Release()
	if err := e.Wait(p.ctx); err != nil {
		return 0, err
	}
	times, err := e.Times()
	if err == nil && times.Ran() < 1 {
		err = fmt.Errorf("opencl: kernel %s: the device reports a running time of %v", kernel, times.Ran())
	}
	return times.Ran(), err
}

// numbers creates a buffer of n numbers, a multiple of 64: i modulo period, minus offset.
func (p *prober) numbers(n int, period uint32, offset float32) (*Buffer, error) {
	b, err := p.context.NewBuffer(4 * int64(n))
	if err != nil {
		return nil, err
	}
	if _, err := p.run("pattern", []int{n}, []int{64}, Global(b), Scalar(period), Scalar(offset)); err != nil {
		b.Release()
		return nil, err
	}
	return b, nil
}

// copies measures the bytes read and written per second.
func (p *prober) copies(limit time.Duration) (float64, error) {
	const period, offset = 1021, 510
	bytes := int64(64 << 20)
	if p.context.device.Type != CPU {
		bytes = 256 << 20 // beyond large caches
	}
	bytes = max(min(bytes, p.context.device.MaxAllocation, p.context.device.Memory/8)&^0xffff, 1<<16)
	n := int(bytes / 4)
	from, err := p.numbers(n, period, offset)
	if err != nil {
		return 0, err
	}
	defer from.Release()
	to, err := p.numbers(n, 1, 0)
	if err != nil {
		return 0, err
	}
	defer to.Release()
	var best float64
	for begin, i := time.Now(), 0; i < 2 || time.Since(begin) < limit; i++ {
		took, err := p.run("copy", []int{n / 4}, []int{64}, Global(to), Global(from))
		if err != nil {
			return 0, err
		}
		best = max(best, 2*float64(bytes)/took.Seconds())
	}
	some := make([]float32, 4096)
	for _, first := range []int{0, n - len(some)} {
		if err := Read(p.ctx, p.queue, to, int64(first), some); err != nil {
			return 0, err
		}
		for i, v := range some {
			if want := float32((first+i)%period) - offset; v != want {
				return 0, fmt.Errorf("opencl: kernel copy gives %g at %d, not %g: the device or its driver is broken",
					v, first+i, want)
			}
		}
	}
	return best, nil
}

// products measures the FLOPs per second of products of square matrices: the best of some sizes,
// each twice as large as the previous one, as far as the time permits.
func (p *prober) products(limit time.Duration, kernel string, rows, columns int, local []int) (float64, error) {
	const smallest, largest = 256, 4096
	var best float64
	begin := time.Now()
	for n := smallest; n <= largest; n *= 2 {
		took, err := p.product(n, n == smallest, kernel, []int{n / columns, n / rows}, local)
		if err != nil {
			return 0, err
		}
		best = max(best, 2*float64(n)*float64(n)*float64(n)/took.Seconds())
		if time.Since(begin)+3*8*took > limit || 4*8*int64(n)*int64(n) > min(p.context.device.MaxAllocation,
			p.context.device.Memory/8) {
			break
		}
	}
	return best, nil
}

// product returns the best time of some products of n×n matrices. With check, it compares the first
// and the last row.
func (p *prober) product(n int, check bool, kernel string, global, local []int) (time.Duration, error) {
	left, err := p.numbers(n*n, 7, 3)
	if err != nil {
		return 0, err
	}
	defer left.Release()
	right, err := p.numbers(n*n, 5, 2)
	if err != nil {
		return 0, err
	}
	defer right.Release()
	result, err := p.numbers(n*n, 1, 1)
	if err != nil {
		return 0, err
	}
	defer result.Release()
	var best time.Duration
	for i := range 3 {
		took, err := p.run(kernel, global, local, Global(result), Global(left), Global(right), Scalar(int32(n)),
			Scalar(int32(n)))
		if err != nil {
			return 0, err
		}
		if i == 0 || took < best {
			best = took
		}
	}
	if !check {
		return best, nil
	}
	row := make([]float32, n)
	for _, i := range []int{0, n - 1} {
		if err := Read(p.ctx, p.queue, result, int64(i*n), row); err != nil {
			return 0, err
		}
		for j, v := range row {
			want := 0
			for t := range n {
				want += ((i*n+t)%7 - 3) * ((t*n+j)%5 - 2)
			}
			if v != float32(want) {
				return 0, fmt.Errorf("opencl: kernel %s gives %g in row %d, column %d of %d×%d, not %d: the device "+
					"or its driver is broken", kernel, v, i, j, n, n, want)
			}
		}
	}
	return best, nil
}
