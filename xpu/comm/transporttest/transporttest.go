// Package transporttest tests implementations of [comm.Transport]: every method, and the results of
// the reductions that use them.
package transporttest

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"mula/xpu/comm"
)

// A check is run by all ranks of a group, and may leave the group unusable.
type check struct {
	name string
	run  func(ctx context.Context, transport comm.Transport) error
}

var checks = []check{
	{"all-to-all", allToAll},
	{"all-to-all with large pieces", largeAllToAll},
	{"all-gather", allGather},
	{"broadcast", broadcast},
	{"send and receive", sendReceive},
	{"crossing sends", crossingSends},
	{"split", split},
	{"groups at the same time", groupsAtOnce},
	{"element types", elementTypes},
	{"order of sums", orderOfSums},
	{"fast sums", fastSums},
	{"started operations", started},
	{"traffic", traffic},
	{"a rank leaves", leaves},
	{"a rank leaves after it has sent", leavesAfterSend},
	{"a rank leaves while others exchange", leavesEarly},
	{"a rank gives up", givesUp},
	{"context done beforehand", doneBeforehand},
	{"context done after a failure", doneAfterFailure},
	{"lengths that do not agree", wrongLengths},
	{"closing what waits", closing},
}

// Together runs all checks on a group whose transports are used by goroutines of this process, and
// closes the transports.
func Together(t *testing.T, transports []comm.Transport) {
	t.Helper()
	folder := t.TempDir()
	var ranks sync.WaitGroup
	for _, transport := range transports {
		ranks.Go(func() {
			Each(transport, folder, func(name string, err error) {
				t.Errorf("%s, %d ranks: %s: rank %d: %v", transport.Name(), transport.Size(), name, transport.Rank(),
					err)
			})
		})
	}
	ranks.Wait()
}

// Each runs all checks as one rank of a world, closes it, and reports the failed checks. The folder
// must be empty and shared by all ranks.
func Each(world comm.Transport, folder string, report func(name string, err error)) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	fatal := func(name string, err error) bool {
		if err != nil {
			report(name, err)
		}
		return err != nil
	}
	if fatal("barrier", barrier(ctx, world, folder)) {
		world.Close()
		return
	}
	for _, c := range checks {
		group, err := world.Split(ctx, 0, world.Rank())
		if fatal(c.name+": split", err) {
			break
		}
		if err := c.run(ctx, group); err != nil {
			report(c.name, err)
		}
		if fatal(c.name+": close", group.Close()) || fatal(c.name+": the world's barrier afterwards",
			world.Barrier(ctx)) {
			break
		}
	}
	if err := world.Close(); err != nil {
		report("close", err)
	}
	if err := world.Close(); err != nil {
		report("close again", err)
	}
	if err := world.Barrier(ctx); err == nil {
		report("close", errors.New("a closed world still has barriers"))
	}
}

// barrier checks a barrier with files, which no transport carries: after the barrier, the files
// that all other ranks created before it must exist.
func barrier(ctx context.Context, transport comm.Transport, folder string) error {
	for round := range 10 {
		name := func(rank int) string { return filepath.Join(folder, fmt.Sprintf("%d-%d", round, rank)) }
		if transport.Rank() == round%transport.Size() {
			for range 100 {
				runtime.Gosched() // let the others arrive first
			}
		}
		if err := os.WriteFile(name(transport.Rank()), nil, 0o644); err != nil {
			return err
		}
		if err := transport.Barrier(ctx); err != nil {
			return err
		}
		for r := range transport.Size() {
			if _, err := os.Stat(name(r)); err != nil {
				return fmt.Errorf("after the barrier, rank %d had not arrived: %w", r, err)
			}
		}
	}
	return nil
}

// pattern returns n bytes that depend on all its arguments.
func pattern(n int, tags ...int) []byte {
	v := uint64(n)
	for _, tag := range tags {
		v = (v + uint64(tag) + 1) * 0x9e3779b97f4a7c15
	}
	b := make([]byte, n+7)
	for i := 0; i < n; i += 8 {
		v = v*0x9e3779b97f4a7c15 + 0x7f4a7c15
		binary.LittleEndian.PutUint64(b[i:], v^v>>32)
	}
	return b[:n]
}

func equal(what string, got, want []byte) error {
	if bytes.Equal(got, want) {
		return nil
	}
	for i := range want {
		if got[i] != want[i] {
			return fmt.Errorf("%s: byte %d of %d is %d, not %d", what, i, len(want), got[i], want[i])
		}
	}
	return fmt.Errorf("%s: %d bytes, not %d", what, len(got), len(want))
}

// exchange is an all-to-all in which rank a sends length(a, b) bytes to rank b.
func exchange(ctx context.Context, transport comm.Transport, tag int, length func(from, to int) int) error {
	n, rank := transport.Size(), transport.Rank()
	send, recv := make([][]byte, n), make([][]byte, n)
	for r := range n {
		send[r], recv[r] = pattern(length(rank, r), tag, rank, r), make([]byte, length(r, rank))
	}
	if err := transport.AllToAll(ctx, send, recv); err != nil {
		return err
	}
	for r := range n {
		if err := equal(fmt.Sprintf("exchange %d, from rank %d", tag, r), recv[r], pattern(length(r, rank), tag, r,
			rank)); err != nil {
			return err
		}
	}
	return nil
}

func allToAll(ctx context.Context, transport comm.Transport) error {
	for round := range 30 {
		random := rand.New(rand.NewPCG(uint64(round), 2))
		lengths := make([]int, transport.Size()*transport.Size())
		for i := range lengths {
			lengths[i] = random.IntN(4) * random.IntN(1<<(round/2))
		}
		if err := exchange(ctx, transport, round,
			func(from, to int) int { return lengths[from*transport.Size()+to] }); err != nil {
			return err
		}
	}
	return exchange(ctx, transport, 1000, func(from, to int) int { return 0 })
}

func largeAllToAll(ctx context.Context, transport comm.Transport) error {
	return exchange(ctx, transport, 0, func(from, to int) int {
		switch {
		case transport.Size() > 2:
			return 1<<20 + from - to
		case from != to:
			return 5<<20 + from
		}
		return to
	})
}

func allGather(ctx context.Context, transport comm.Transport) error {
	for round, unit := range []int{0, 1, 1000, 300_001} {
		all := make([][]byte, transport.Size())
		for r := range all {
			all[r] = make([]byte, unit*((r+round)%3))
		}
		own := pattern(len(all[transport.Rank()]), round, transport.Rank())
		if round%2 == 1 { // in place
			copy(all[transport.Rank()], own)
			own = all[transport.Rank()]
		}
		if err := transport.AllGather(ctx, own, all); err != nil {
			return err
		}
		for r := range all {
			if err := equal(fmt.Sprintf("round %d, rank %d", round, r), all[r],
				pattern(len(all[r]), round, r)); err != nil {
				return err
			}
		}
	}
	return nil
}

func broadcast(ctx context.Context, transport comm.Transport) error {
	for root := range transport.Size() {
		for _, n := range []int{0, 1, 1 << 20} {
			data := make([]byte, n)
			if transport.Rank() == root {
				data = pattern(n, root)
			}
			if err := transport.Broadcast(ctx, root, data); err != nil {
				return err
			}
			if err := equal(fmt.Sprintf("root %d", root), data, pattern(n, root)); err != nil {
				return err
			}
		}
	}
	return nil
}

func sendReceive(ctx context.Context, transport comm.Transport) error {
	n, rank := transport.Size(), transport.Rank()
	if n == 1 {
		return nil
	}
	// A ring with many messages in a row, and exchanges among all ranks between them.
	for round, length := range []int{0, 1, 40_000, 300_000, 3} {
		const messages = 8
		for i := range messages {
			if err := transport.Send(ctx, (rank+1)%n, pattern(length+i, round, i, rank)); err != nil {
				return err
			}
		}
		from := (rank + n - 1) % n
		for i := range messages {
			data := make([]byte, length+i)
			if err := transport.Recv(ctx, from, data); err != nil {
				return err
			}
			if err := equal(fmt.Sprintf("message %d of %d", i, messages), data,
				pattern(length+i, round, i, from)); err != nil {
				return err
			}
		}
		if err := exchange(ctx, transport, round, func(from, to int) int { return 100 * from }); err != nil {
			return err
		}
	}
	// Only two ranks call.
	if rank < 2 {
		data := pattern(10, 7)
		if rank == 1 {
			data = make([]byte, 10)
			if err := transport.Recv(ctx, 0, data); err != nil {
				return err
			}
			return equal("from rank 0", data, pattern(10, 7))
		}
		return transport.Send(ctx, 1, data)
	}
	return nil
}

func crossingSends(ctx context.Context, transport comm.Transport) error {
	length := 500_000
	if transport.Size() == 2 {
		length = 12 << 20 // more than any buffer of the transport
	}
	for r := range transport.Size() {
		if r != transport.Rank() {
			data := pattern(length, transport.Rank(), r)
			if err := transport.Send(ctx, r, data); err != nil {
				return err
			}
			clear(data) // Send has copied it
		}
	}
	for r := range transport.Size() {
		if r != transport.Rank() {
			data := make([]byte, length)
			if err := transport.Recv(ctx, r, data); err != nil {
				return err
			}
			if err := equal(fmt.Sprintf("from rank %d", r), data, pattern(length, r, transport.Rank())); err != nil {
				return err
			}
		}
	}
	return nil
}

// members checks that a group consists of the given ranks of its parent, in this order.
func members(ctx context.Context, parent, part comm.Transport, want []int) error {
	if part.Size() != len(want) || want[part.Rank()] != parent.Rank() {
		return fmt.Errorf("rank %d is %d of %d in the group %v", parent.Rank(), part.Rank(), part.Size(), want)
	}
	all := make([][]byte, part.Size())
	for r := range all {
		all[r] = make([]byte, 1)
	}
	if err := part.AllGather(ctx, []byte{byte(parent.Rank())}, all); err != nil {
		return err
	}
	for r, b := range all {
		if int(b[0]) != want[r] {
			return fmt.Errorf("rank %d of the group is %d of its parent, not %d", r, b[0], want[r])
		}
	}
	return nil
}

func split(ctx context.Context, transport comm.Transport) error {
	n, rank := transport.Size(), transport.Rank()
	var every, backwards, low []int
	for r := range n {
		every = append(every, r)
		backwards = append(backwards, n-1-r)
	}
	low = every[:(n+1)/2]
	same, err := transport.Split(ctx, 5, 0) // equal keys: ordered by rank
	if err != nil {
		return err
	}
	if err := members(ctx, transport, same, every); err != nil {
		return err
	}
	turned, err := transport.Split(ctx, 1, -1000*rank)
	if err != nil {
		return err
	}
	if err := members(ctx, transport, turned, backwards); err != nil {
		return err
	}
	color := -1
	if rank < len(low) {
		color = 0
	}
	some, err := transport.Split(ctx, color, rank)
	if err != nil {
		return err
	}
	if (some == nil) != (color < 0) {
		return fmt.Errorf("color %d gives %v", color, some)
	}
	if some != nil {
		if err := members(ctx, transport, some, low); err != nil {
			return err
		}
		// Groups of a group: the odd and the even ranks.
		part, err := some.Split(ctx, rank%2, 0)
		if err != nil {
			return err
		}
		var want []int
		for _, r := range low {
			if r%2 == rank%2 {
				want = append(want, r)
			}
		}
		if err := members(ctx, transport, part, want); err != nil {
			return err
		}
	}
	if err := same.Close(); err != nil {
		return err
	}
	return turned.Barrier(ctx) // turned is another group
}

func groupsAtOnce(ctx context.Context, transport comm.Transport) error {
	const groups = 4
	errs := make([]error, groups)
	var running sync.WaitGroup
	for g := range groups {
		part, err := transport.Split(ctx, 0, 0)
		if err != nil {
			return err
		}
		running.Go(func() {
			group := comm.New(part)
			x := make([]float32, 30_000+g)
			for round := range 10 {
				if errs[g] = exchange(ctx, part, round, func(from, to int) int {
					return 1000*g + 100*from +
						to
				}); errs[g] != nil {
					return
				}
				for i := range x {
					x[i] = float32(g + round + part.Rank())
				}
				if errs[g] = comm.AllReduce(ctx, group, x); errs[g] != nil {
					return
				}
				n := part.Size()
				if want := float32(n*(g+round) + n*(n-1)/2); x[0] != want || x[len(x)-1] != want {
					errs[g] = fmt.Errorf("group %d, round %d: sums %v and %v, not %v", g, round, x[0], x[len(x)-1],
						want)
					return
				}
				if g == 0 {
					runtime.GC()
				}
			}
		})
	}
	running.Wait()
	return errors.Join(errs...)
}

// pretendHosts returns divisions of ranks into hosts: the names of each rank's host.
func pretendHosts(size int) map[string][]string {
	divisions := map[string]func(rank int) int{
		"one host":          func(int) int { return 0 },
		"hosts of 1":        func(rank int) int { return rank },
		"hosts of 2":        func(rank int) int { return rank / 2 },
		"hosts of 4":        func(rank int) int { return rank / 4 },
		"a small host":      func(rank int) int { return (rank + 2) / 3 },
		"alternating hosts": func(rank int) int { return rank % 2 },
	}
	hosts := map[string][]string{}
	for name, of := range divisions {
		for rank := range size {
			hosts[name] = append(hosts[name], fmt.Sprint("host ", of(rank)))
		}
	}
	return hosts
}

func elementTypes(ctx context.Context, transport comm.Transport) error {
	hosts := pretendHosts(transport.Size())
	for _, name := range slices.Sorted(maps.Keys(hosts)) {
		c := comm.New(transport)
		c.SetHosts(hosts[name])
		if err := ofAllTypes(ctx, c); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

func ofAllTypes(ctx context.Context, c *comm.Comm) error {
	return errors.Join(
		elements[uint8](ctx, c), elements[uint16](ctx, c), elements[int32](ctx, c), elements[uint32](ctx,
			c), elements[int64](ctx, c),
		elements[uint64](ctx, c), elements[float32](ctx, c), elements[float64](ctx, c), numbers[int64](ctx,
			c), numbers[float32](ctx, c),
		numbers[float64](ctx, c),
	)
}

func elements[E comm.Element](ctx context.Context, c *comm.Comm) error {
	n, rank := c.Size(), c.Rank()
	value := func(from, to, i int) E { return E(1 + 50*from + 10*to + i) }
	bounds, back := []int{0}, []int{0} // bounds of the elements that this rank sends, and receives
	for r := range n {
		bounds, back = append(bounds, bounds[r]+1+r), append(back, back[r]+1+rank)
	}
	send, recv := make([]E, bounds[n]), make([]E, back[n])
	for r := range n {
		for i := range send[bounds[r]:bounds[r+1]] {
			send[bounds[r]+i] = value(rank, r, i)
		}
	}
	if err := comm.AllToAll(ctx, c, send, bounds, recv, back); err != nil {
		return err
	}
	for r := range n {
		for i, v := range recv[back[r]:back[r+1]] {
			if v != value(r, rank, i) {
				return fmt.Errorf("%T: all-to-all: %v, not %v", v, v, value(r, rank, i))
			}
		}
	}
	all := make([]E, bounds[n])
	for i := range all[bounds[rank]:bounds[rank+1]] {
		all[bounds[rank]+i] = value(rank, 0, i)
	}
	if err := comm.AllGather(ctx, c, all, bounds); err != nil {
		return err
	}
	for r := range n {
		for i, v := range all[bounds[r]:bounds[r+1]] {
			if v != value(r, 0, i) {
				return fmt.Errorf("%T: all-gather: %v, not %v", v, v, value(r, 0, i))
			}
		}
	}
	one := []E{E(rank), value(rank, 1, 1)}
	if err := comm.Broadcast(ctx, c, n-1, one); err != nil {
		return err
	}
	if one[0] != E(n-1) || one[1] != value(n-1, 1, 1) {
		return fmt.Errorf("%T: broadcast: %v", one, one)
	}
	if n == 1 {
		return nil
	}
	if err := comm.Send(ctx, c, (rank+1)%n, []E{value(rank, 0, 3)}); err != nil {
		return err
	}
	if err := comm.Recv(ctx, c, (rank+n-1)%n, one[:1]); err != nil {
		return err
	}
	if want := value((rank+n-1)%n, 0, 3); one[0] != want {
		return fmt.Errorf("%T: receive: %v, not %v", one, one[0], want)
	}
	return nil
}

func numbers[N comm.Number](ctx context.Context, c *comm.Comm) error {
	n := c.Size()
	x := make([]N, 11)
	for i := range x {
		x[i] = N(100*c.Rank() + i)
	}
	if err := comm.AllReduce(ctx, c, x); err != nil {
		return err
	}
	for i, v := range x {
		if want := N(100*n*(n-1)/2 + n*i); v != want {
			return fmt.Errorf("%T: all-reduce: %v, not %v", v, v, want)
		}
	}
	return nil
}

// terms returns the numbers that a rank adds: their sizes differ so much that every order of
// additions has its own bits.
func terms(rank, n int) []float32 {
	random := rand.New(rand.NewPCG(uint64(rank), 3))
	x := make([]float32, n)
	for i := range x {
		// of either sign, between 2^-27 and 2^5
		x[i] = math.Float32frombits(random.Uint32()&(1<<31|31<<23|1<<23-1) + 100<<23)
	}
	return x
}

// sums adds the terms element by element, in stages of inner ranks.
func sums(size, inner, n int) []float32 {
	all := make([][]float32, size)
	for r := range all {
		all[r] = terms(r, n)
	}
	out := make([]float32, n)
	for i := range out {
		for first := 0; first < size; first += inner {
			stage := all[first][i]
			for r := first + 1; r < first+inner; r++ {
				stage += all[r][i]
			}
			if first == 0 {
				out[i] = stage
			} else {
				out[i] += stage
			}
		}
	}
	return out
}

// rounded returns numbers, which are not denormal, rounded to bfloat16, to nearest even.
func rounded(x []float32) []comm.BF16 {
	halves := make([]comm.BF16, len(x))
	for i, v := range x {
		b := math.Float32bits(v)
		halves[i] = comm.BF16((b + 0x7fff + b>>16&1) >> 16)
	}
	return halves
}

// sumsOfHalves is sums of the rounded terms: in float32, and rounded after each stage.
func sumsOfHalves(size, inner, n int) []comm.BF16 {
	wide := func(halves []comm.BF16) []float32 {
		x := make([]float32, len(halves))
		for i, h := range halves {
			x[i] = math.Float32frombits(uint32(h) << 16)
		}
		return x
	}
	var total []float32
	for first := 0; first < size; first += inner {
		stage := wide(rounded(terms(first, n)))
		for r := first + 1; r < first+inner; r++ {
			for i, v := range wide(rounded(terms(r, n))) {
				stage[i] += v
			}
		}
		stage = wide(rounded(stage))
		if first == 0 {
			total = stage
			continue
		}
		for i, v := range stage {
			total[i] += v
		}
	}
	return rounded(total)
}

func sameBits(what string, got, want []float32) error {
	for i := range want {
		if math.Float32bits(got[i]) != math.Float32bits(want[i]) {
			return fmt.Errorf("%s: element %d of %d is %x, not %x", what, i, len(want), math.Float32bits(got[i]),
				math.Float32bits(want[i]))
		}
	}
	return nil
}

func orderOfSums(ctx context.Context, transport comm.Transport) error {
	hosts := pretendHosts(transport.Size())
	for _, name := range slices.Sorted(maps.Keys(hosts)) {
		c := comm.New(transport)
		c.SetHosts(hosts[name])
		if err := sumsInOrder(ctx, c); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

func sumsInOrder(ctx context.Context, c *comm.Comm) error {
	size, rank := c.Size(), c.Rank()
	for inner := 1; inner <= size; inner++ {
		if size%inner != 0 {
			continue
		}
		c.SetInner(inner)
		for round, n := range []int{0, 1, size - 1, 5000, 900_014} {
			if n > 5000 && (size > 3 || inner > 1) { // with few ranks a part is sent in several pieces
				continue
			}
			want := sums(size, inner, n)
			what := fmt.Sprintf("stages of %d, %d elements", inner, n)
			x := terms(rank, n)
			if err := comm.AllReduce(ctx, c, x); err != nil {
				return err
			}
			if err := sameBits(what+": all-reduce", x, want); err != nil {
				return err
			}
			halves := rounded(terms(rank, n))
			if err := comm.AllReduce(ctx, c, halves); err != nil {
				return err
			}
			if !slices.Equal(halves, sumsOfHalves(size, inner, n)) {
				return fmt.Errorf("%s: all-reduce of bf16: other bits", what)
			}
			// Parts of any length, some of them empty, with elements before and after them.
			random := rand.New(rand.NewPCG(uint64(round), 4))
			bounds := make([]int, size+1)
			for r := range bounds {
				bounds[r] = random.IntN(n + 1)
			}
			slices.Sort(bounds)
			x = terms(rank, n)
			if err := comm.ReduceScatter(ctx, c, x, bounds); err != nil {
				return err
			}
			lo, hi := bounds[rank], bounds[rank+1]
			if err := sameBits(what+": reduce-scatter", x[lo:hi], want[lo:hi]); err != nil {
				return err
			}
			if err := comm.AllGather(ctx, c, x, bounds); err != nil {
				return err
			}
			if err := sameBits(what+": all-gather", x[bounds[0]:bounds[size]],
				want[bounds[0]:bounds[size]]); err != nil {
				return err
			}
		}
	}
	return nil
}

func fastSums(ctx context.Context, transport comm.Transport) error {
	c := comm.New(transport)
	c.SetFast(true)
	part, err := c.Split(ctx, 0, c.Rank())
	if err != nil {
		return err
	}
	for _, n := range []int{0, 1, 1000, 100_000} {
		x := make([]float32, n)
		for i := range x {
			x[i] = 1 / float32(1+c.Rank()+i%7)
		}
		var want [7]float64
		for i := range want {
			for r := range c.Size() {
				want[i] += 1 / float64(1+r+i)
			}
		}
		if err := comm.AllReduce(ctx, part, x); err != nil {
			return err
		}
		for i, v := range x {
			if math.Abs(float64(v)-want[i%7]) > 1e-6*want[i%7] {
				return fmt.Errorf("element %d of %d is %v, not %v", i, n, v, want[i%7])
			}
		}
		first := slices.Clone(x)
		if err := comm.Broadcast(ctx, c, 0, first); err != nil {
			return err
		}
		if err := sameBits("beside rank 0", x, first); err != nil {
			return err
		}
	}
	return nil
}

func started(ctx context.Context, transport comm.Transport) error {
	c := comm.New(transport)
	const operations = 20
	x := make([][]float64, operations)
	pending := make([]*comm.Pending, operations)
	for i := range x {
		x[i] = make([]float64, 1000*(i%3)+1)
		for j := range x[i] {
			x[i][j] = float64(i)
		}
		pending[i] = c.Start(ctx, func(ctx context.Context) error { return comm.AllReduce(ctx, c, x[i]) })
	}
	for i, p := range pending {
		if err := p.Wait(); err != nil {
			return err
		}
		if want := float64(i * c.Size()); x[i][0] != want || x[i][len(x[i])-1] != want {
			return fmt.Errorf("operation %d: %v, not %v", i, x[i][0], want)
		}
	}
	failing := c.Start(ctx, func(context.Context) error { return errTest })
	if err := failing.Wait(); err != errTest {
		return fmt.Errorf("a failing operation gives %v", err)
	}
	return c.Close()
}

var errTest = errors.New("for a test")

func traffic(ctx context.Context, transport comm.Transport) error {
	c := comm.New(transport)
	n, rank := c.Size(), c.Rank()
	x := make([]float32, 12*n)
	even, ragged, back := make([]int, n+1), make([]int, n+1), make([]int, n+1)
	for r := range n {
		even[r+1], ragged[r+1], back[r+1] = 12*(r+1), ragged[r]+r, back[r]+rank
	}
	z := int64(4 * len(x)) // bytes
	others := int64(n - 1)
	var toOthers int64
	for r := range n {
		if r != rank {
			toOthers += 4 * int64(r)
		}
	}
	want := []comm.Traffic{
		{Operation: comm.OpAllReduce, Calls: 1, Inside: 2 * z * others / int64(n)},
		{Operation: comm.OpReduceScatter, Calls: 1, Inside: z * others / int64(n)},
		{Operation: comm.OpAllGather, Calls: 1, Inside: z * others / int64(n)},
		{Operation: comm.OpAllToAll, Calls: 1, Inside: toOthers},
		{Operation: comm.OpBroadcast, Calls: 2},
		{Operation: comm.OpSend},
	}
	if rank == 0 {
		want[comm.OpBroadcast].Inside = 2 * z * others
	}
	err := errors.Join(
		comm.AllReduce(ctx, c, x), comm.ReduceScatter(ctx, c, x, even), comm.AllGather(ctx, c, x, even),
		comm.AllToAll(ctx, c, x, ragged, make([]float32, back[n]), back), comm.Broadcast(ctx, c, 0, x),
		comm.Broadcast(ctx, c, 0, x),
		c.Barrier(ctx),
	)
	if err != nil {
		return err
	}
	if n > 1 {
		want[comm.OpSend] = comm.Traffic{Operation: comm.OpSend, Calls: 1, Inside: z}
		if err := errors.Join(comm.Send(ctx, c, (rank+1)%n, x), comm.Recv(ctx, c, (rank+n-1)%n, x)); err != nil {
			return err
		}
	}
	for i, got := range c.Traffic() {
		if got != want[i] {
			return fmt.Errorf("%v: %d calls and %d bytes, not %d and %d", got.Operation, got.Calls, got.Bytes(),
				want[i].Calls, want[i].Bytes())
		}
	}
	c.ResetTraffic()
	for _, got := range c.Traffic() {
		if got.Calls != 0 || got.Bytes() != 0 {
			return fmt.Errorf("%v after a reset: %d calls, %d bytes", got.Operation, got.Calls, got.Bytes())
		}
	}
	return nil
}

// lost checks that an error reports a lost rank.
func lost(err error) error {
	if !errors.Is(err, comm.ErrPeerLost) {
		return fmt.Errorf("instead of a lost peer: %w", cmpNil(err))
	}
	return nil
}

func cmpNil(err error) error {
	if err == nil {
		return errors.New("no error")
	}
	return err
}

// leaves: the last rank leaves. All others wait for it and get an error, also in groups that were
// split off, and in every later call.
func leaves(ctx context.Context, transport comm.Transport) error {
	n, rank := transport.Size(), transport.Rank()
	part, err := transport.Split(ctx, 0, 0)
	if err != nil {
		return err
	}
	if rank == n-1 {
		// Leave only when the others have their groups: the first rank that notices ends the group
		// for all.
		for r := range n - 1 {
			if err := transport.Recv(ctx, r, make([]byte, 1)); err != nil {
				return err
			}
		}
		return transport.Close()
	}
	if err := transport.Send(ctx, n-1, make([]byte, 1)); err != nil {
		return err
	}
	for range 2 {
		if err := lost(transport.Barrier(ctx)); err != nil {
			return err
		}
	}
	return lost(part.Recv(ctx, n-1, make([]byte, 5)))
}

func leavesAfterSend(ctx context.Context, transport comm.Transport) error {
	n, rank := transport.Size(), transport.Rank()
	if n == 1 {
		return nil
	}
	lengths := []int{0, 10, 100_000}
	if rank == n-1 {
		for _, length := range lengths {
			for r := range n - 1 {
				if err := transport.Send(ctx, r, pattern(length, r)); err != nil {
					return err
				}
			}
		}
		return transport.Close()
	}
	for _, length := range lengths {
		data := make([]byte, length)
		if err := transport.Recv(ctx, n-1, data); err != nil {
			return err
		}
		if err := equal("what was sent before", data, pattern(length, rank)); err != nil {
			return err
		}
	}
	// The first rank that notices ends the group for all. Leave only when the others have received
	// the messages.
	if rank > 0 {
		// Rank 0 may receive the message and end the group before this call returns. If the message
		// does not arrive, rank 0 reports it.
		_ = transport.Send(ctx, 0, make([]byte, 1))
		return nil
	}
	for r := 1; r < n-1; r++ {
		if err := transport.Recv(ctx, r, make([]byte, 1)); err != nil {
			return err
		}
	}
	return lost(transport.Recv(ctx, n-1, make([]byte, 1)))
}

// leavesEarly: a rank that has done its part may leave while others are still working.
func leavesEarly(ctx context.Context, transport comm.Transport) error {
	for round := range 20 {
		part, err := transport.Split(ctx, 0, round*transport.Rank())
		if err != nil {
			return err
		}
		if err := exchange(ctx, part, round, func(from, to int) int { return 1 << round / (1 + from) }); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
		if err := part.Close(); err != nil {
			return err
		}
	}
	return nil
}

// givesUp: rank 0 does not call until the others have given up.
func givesUp(ctx context.Context, transport comm.Transport) error {
	n, rank := transport.Size(), transport.Rank()
	if n == 1 {
		return nil
	}
	group, err := transport.Split(ctx, 0, rank)
	if err != nil {
		return err
	}
	short, cancel := context.WithCancel(ctx)
	defer cancel()
	if rank > 0 {
		buffer := make([]byte, 1000)
		go func() {
			time.Sleep(time.Duration(rank) * 10 * time.Millisecond) // by then it is probably waiting, but need not be
			cancel()
		}()
		err := group.Recv(short, 0, buffer)
		if !errors.Is(err, context.Canceled) && !errors.Is(err, comm.ErrPeerLost) {
			return fmt.Errorf("a wait that is cancelled gives %w", cmpNil(err))
		}
		if rank == 1 && !errors.Is(err, context.Canceled) && n == 2 {
			return fmt.Errorf("a wait that is cancelled gives %w", cmpNil(err))
		}
	}
	if err := transport.Barrier(ctx); err != nil {
		return err
	}
	if rank > 0 {
		return nil
	}
	return lost(group.Barrier(ctx))
}

func doneBeforehand(ctx context.Context, transport comm.Transport) error {
	done, cancel := context.WithCancel(ctx)
	cancel()
	err := transport.Barrier(done)
	if !errors.Is(err, context.Canceled) && !errors.Is(err, comm.ErrPeerLost) {
		return fmt.Errorf("a done context gives %w", cmpNil(err))
	}
	if err := transport.Barrier(ctx); err == nil {
		return errors.New("the group is still usable")
	}
	return nil
}

// doneAfterFailure: a rank that knows the cause of the group's failure reports it, even if its
// context is done too.
func doneAfterFailure(ctx context.Context, transport comm.Transport) error {
	n, rank := transport.Size(), transport.Rank()
	if n == 1 {
		return nil
	}
	done, cancel := context.WithCancel(ctx)
	cancel()
	if rank == n-1 {
		if err := transport.Barrier(done); err == nil {
			return errors.New("a done context gives no error")
		}
		return nil
	}
	if err := lost(transport.Barrier(ctx)); err != nil {
		return err
	}
	for range 20 { // a random choice between the two would fail
		for name, err := range map[string]error{
			"barrier": transport.Barrier(done),
			"receive": transport.Recv(done, n-1, make([]byte, 1)),
			"send":    transport.Send(done, n-1, make([]byte, 1)),
		} {
			if err := lost(err); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
	}
	return nil
}

// wrongLengths: rank 0 sends rank 1 fewer or more bytes than it expects.
func wrongLengths(ctx context.Context, transport comm.Transport) error {
	if transport.Size() == 1 {
		return nil
	}
	for _, length := range []int{9, 11} {
		group, err := transport.Split(ctx, 0, transport.Rank())
		if err != nil {
			return err
		}
		switch group.Rank() {
		case 0:
			err = group.Send(ctx, 1, make([]byte, length))
		case 1:
			if err = group.Recv(ctx, 0, make([]byte, 10)); err == nil {
				return fmt.Errorf("%d bytes arrive as 10", length)
			}
			err = nil
		}
		if err != nil {
			return err
		}
		if err := group.Barrier(ctx); err == nil {
			return fmt.Errorf("after a message of %d bytes instead of 10 the group is still usable", length)
		}
		if err := transport.Barrier(ctx); err != nil {
			return err
		}
	}
	return nil
}

// closing: Close ends the operations that this rank started; nothing is running after it.
func closing(ctx context.Context, transport comm.Transport) error {
	if transport.Size() == 1 {
		return nil
	}
	part, err := transport.Split(ctx, 0, 0)
	if err != nil {
		return err
	}
	c := comm.New(part)
	var running atomic.Int32
	var pending *comm.Pending
	if part.Rank() == 0 {
		begun := make(chan struct{})
		pending = c.Start(ctx, func(ctx context.Context) error {
			running.Add(1)
			defer running.Add(-1)
			close(begun)
			return comm.Recv(ctx, c, 1, make([]float32, 100)) // no rank sends this
		})
		<-begun
	}
	if err := c.Close(); err != nil {
		return err
	}
	if running.Load() != 0 {
		return errors.New("after Close an operation is running")
	}
	if pending != nil && pending.Wait() == nil {
		return errors.New("an operation on a closed group has no error")
	}
	if err := c.Start(ctx, func(context.Context) error { return nil }).Wait(); err == nil {
		return errors.New("an operation can be started on a closed group")
	}
	return nil
}
