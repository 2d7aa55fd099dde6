package train

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"

	"mula/internal/launchers"
	"mula/internal/strictyaml"
	"mula/train/collective"
	"mula/xpu/comm"
	"mula/xpu/comm/local"
	"mula/xpu/comm/mpi"
	"mula/xpu/comm/tcp"
)

// Join connects to the other processes of a run, which mpiexec or mula launch has started;
// layout.transport selects the transport. It returns nil if the run has one process, whose ranks
// are goroutines. While ranks with the tcp transport are missing, Join calls waiting from time to
// time with a text that names them. The caller closes the group after [Run] has returned.
func Join(ctx context.Context, config Config, waiting func(text string)) (*comm.Comm, error) {
	if err := config.Validate(); err != nil {
		return nil, err
	}
	options, launched, err := tcp.FromEnvironment()
	kind, kindErr := linksOf(config.Layout.Links)
	if kindErr != nil {
		return nil, kindErr
	}
	var link comm.Transport
	switch {
	case kind == LocalLinks:
		return nil, startedWith(1)
	case kind == MPILinks:
		link, err = mpi.Init(ctx)
	case err != nil:
		return nil, err
	case !launched:
		return nil, &strictyaml.FieldError{Field: "layout.transport",
			Message: " is \"tcp\", but mula launch did not start this " +
				"process; start the run with mula launch"}
	default:
		options.Waiting = waiting
		link, err = tcp.Join(ctx, options)
	}
	if err != nil {
		return nil, err
	}
	world := comm.New(link)
	err = startedWith(world.Size())
	if err == nil && kind == MPILinks && world.Size() == 1 && config.Layout.Ranks() > 1 {
		err = loneRank(link.Name())
	}
	if err != nil {
		world.Close()
		return nil, err
	}
	return world, nil
}

// linksOf returns the transport of this process: layout.transport, or for auto the transport from
// the environment. It returns an error in one of several processes that cannot find each other,
// because each of them would run the whole job.
func linksOf(kind LinkKind) (LinkKind, error) {
	process, started := launchers.Find()
	if kind == AutoLinks {
		switch {
		case os.Getenv(tcp.RankVariable) != "":
			kind = TCPLinks
		case os.Getenv(tcp.SizeVariable) == "1": // mula launch has started one process for all ranks
			kind = LocalLinks
		case mpi.Launched():
			kind = MPILinks
		case started && process.Size > 1:
			return "", separateProcesses(process)
		default:
			kind = LocalLinks
		}
	}
	if kind == MPILinks && !mpi.Launched() && started && process.Size > 1 {
		return "", separateProcesses(process)
	}
	return kind, nil
}

// separateProcesses is the error of a process that a launcher has started as one of several, but
// that cannot find the other processes.
func separateProcesses(p launchers.Process) error {
	pmi := ""
	if p.Launcher.Rank == "SLURM_PROCID" {
		pmi = "start the run with srun --mpi=pmi2 or --mpi=pmix (srun --mpi=list shows the choices), " +
			"or with mula launch"
	} else {
		pmi = "start the run with mula launch or mpiexec"
	}
	return &strictyaml.FieldError{Field: "layout.transport",
		Message: fmt.Sprintf(": %s has started %d processes (%s), but "+
			"without "+
			"PMI for MPI, so each process would train the whole run; %s. If each process is a separate run with its "+
			"own output, set layout.transport to local", p.Launcher.Name, p.Size,
			p.Launcher.Size, pmi)}
}

// startedWith returns an error if the size of the world differs from the number of ranks that mula
// launch has started.
func startedWith(size int) error {
	text := os.Getenv(tcp.SizeVariable)
	if n, err := strconv.Atoi(text); text == "" || err == nil && n == size {
		return nil
	}
	return &strictyaml.FieldError{Field: "layout.transport",
		Message: fmt.Sprintf(": mula launch has started %s ranks (%s), but "+
			"this rank is in a world of size %d; use the mpiexec or srun of the same MPI library, or mula launch "+
			"--with tcp", text, tcp.SizeVariable, size)}
}

// loneRank is the error of a process whose MPI library sees no other process, although the layout
// has several ranks.
func loneRank(library string) error {
	p, _ := launchers.Find()
	return &strictyaml.FieldError{Field: "layout.transport",
		Message: fmt.Sprintf(": %s has started this process (%s), but %s sees "+
			"no other process; name the MPI library of %s in %s, or start the run with mula launch --with tcp",
			p.Launcher.Name, p.Launcher.Rank, library, p.Launcher.Name, mpi.LibraryVariable)}
}

// fitsWorld returns an error if the layout is not for ranks ranks. The error names possible
// layouts.
func (c Config) fitsWorld(ranks int) error {
	shape := c.Layout.shape()
	if shape.Ranks() == ranks {
		return nil
	}
	axes, stages := comm.Data, ""
	readers, pp := ranks, shape.Size(comm.PP)
	if pp > 1 {
		axes = comm.World
		stages = "pp: 1, "
		if ranks%pp == 0 {
			readers, stages = ranks/pp, fmt.Sprintf("pp: %d, ", pp)
		}
	}
	var possible []string
	for _, ep := range divisors(readers) {
		if ep == 1 || c.Model.Experts > 0 && c.Model.Experts%ep == 0 {
			possible = append(possible, fmt.Sprintf("{expert_dp: %d, %sep: %d}", readers/ep, stages, ep))
		}
	}
	text := "possible: " + strings.Join(possible, ", ")
	if c.BatchSize%readers != 0 {
		text = fmt.Sprintf("start %d, or make batch_size (now %d) a multiple of %d and set layout to one of %s",
			shape.Ranks(), c.BatchSize, readers, strings.Join(possible, ", "))
	}
	return &strictyaml.FieldError{Field: "layout",
		Message: fmt.Sprintf(" is %s ranks, but %d were started; %s", shape.Product(axes, ""), ranks, text)}
}

func divisors(n int) []int {
	var all []int
	for d := 1; d <= n; d++ {
		if n%d == 0 {
			all = append(all, d)
		}
	}
	return all
}

// ranks has the groups of a rank and the hosts of all ranks.
type ranks struct {
	*comm.Mesh
	within *comm.Comm // the ranks of [comm.EP] again, for gradients in transit at the same time as tokens

	hosts   []string // of each rank
	sharing int      // ranks on the same processors of this host, including this rank

	each   []int   // bounds of one number from each rank
	counts []int64 // one from each
}

// newRanks creates the groups of a layout from the world.
func newRanks(ctx context.Context, world *comm.Comm, layout LayoutConfig) (*ranks, error) {
	mesh, err := comm.NewMesh(ctx, world, layout.shape())
	if err != nil {
		return nil, err
	}
	r := &ranks{Mesh: mesh}
	if r.within, err = mesh.Split(ctx, comm.EP); err != nil {
		r.Close()
		return nil, err
	}
	r.counts, r.each = make([]int64, world.Size()), make([]int, world.Size()+1)
	for i := range r.each {
		r.each[i] = i
	}
	for _, group := range []*comm.Comm{r.Group(comm.Replicas), r.Group(comm.Data), r.within} {
		group.SetFast(layout.Sums == FastSums)
	}
	type location struct{ Host, Processors string }
	own := location{collective.Hostname(), processors()}
	locations, err := collective.Gather(ctx, world, own)
	if err != nil {
		r.Close()
		return nil, err
	}
	for _, l := range locations {
		r.hosts = append(r.hosts, l.Host)
		if l == own {
			r.sharing++
		}
	}
	return r, nil
}

// onHost returns the number of ranks on this rank's host.
func (r *ranks) onHost() int {
	n := 0
	for _, host := range r.hosts {
		if host == r.hosts[r.Rank()] {
			n++
		}
	}
	return n
}

// numberOnHost returns this rank's number among the ranks on its host.
func (r *ranks) numberOnHost() int {
	n := 0
	for _, host := range r.hosts[:r.Rank()] {
		if host == r.hosts[r.Rank()] {
			n++
		}
	}
	return n
}

// sum returns the sum of a number of each rank, on all ranks.
func (r *ranks) sum(ctx context.Context, n int64) (int64, error) {
	r.counts[0] = n
	err := comm.AllReduce(ctx, r.World(), r.counts[:1])
	return r.counts[0], err
}

// all returns the numbers of all ranks on every rank. The result is valid until the next call.
func (r *ranks) all(ctx context.Context, n int64) ([]int64, error) {
	r.counts[r.Rank()] = n
	return r.counts, comm.AllGather(ctx, r.World(), r.counts, r.each)
}

// threads returns the number of threads of this rank's device. Ranks on the same processors share
// the threads of the process evenly. A number from threads or the environment is per process.
func (r *ranks) threads(config Config, ranksHere int) int {
	n := config.Threads
	switch {
	case r.Ranks() == 1:
		return n
	case n == 0 && (ranksHere > 1 || os.Getenv("GOMAXPROCS") == ""):
		return max(1, runtime.GOMAXPROCS(0)/r.sharing)
	case n == 0:
		return runtime.GOMAXPROCS(0)
	}
	return max(1, n/max(1, ranksHere))
}

// mostLocal is the largest number of ranks that are goroutines of one process.
const mostLocal = 256

// runLocal is Run with ranks that are goroutines of this process. Rank 0 is the caller's goroutine.
func runLocal(ctx context.Context, config Config, options Options) (Result, error) {
	n := config.Layout.Ranks()
	if n > mostLocal {
		return Result{}, &strictyaml.FieldError{Field: "layout",
			Message: fmt.Sprintf(" has %d ranks, but one process can have "+
				"at most %d; start the run with mula launch or mpiexec", n, mostLocal)}
	}
	results, errs := make([]Result, n), make([]error, n)
	run := func(rank int, link comm.Transport) {
		o := options // only the first rank calls its functions
		o.World, o.ranksHere = comm.New(link), n
		results[rank], errs[rank] = Run(ctx, config, o)
		if errs[rank] == nil {
			errs[rank] = o.World.Barrier(ctx)
		}
		o.World.Close()
	}
	links := local.New(n)
	var others sync.WaitGroup
	for rank := 1; rank < n; rank++ {
		others.Go(func() { run(rank, links[rank]) })
	}
	run(0, links[0])
	others.Wait()
	return results[0], firstCause(errs)
}

// firstCause returns the error of the rank that caused the end of the run.
func firstCause(errs []error) error {
	var lost error
	for _, err := range errs {
		var shared *collective.GroupError
		switch {
		case err == nil:
		case errors.As(err, &shared):
			for rank, f := range shared.Failures {
				if f.Error != "" && rank < len(errs) && errs[rank] != nil {
					return errs[rank] // the error itself, for errors.Is
				}
			}
			return err
		case !errors.Is(err, comm.ErrPeerLost):
			return err
		case lost == nil:
			lost = err
		}
	}
	return lost
}
