// Package group connects the ranks of a run, and has their groups, hosts and threads.
package group

import (
	"context"
	"fmt"
	"os"
	"runtime"
	"strconv"

	"mula/internal/launchers"
	"mula/internal/strictyaml"
	"mula/train/collective"
	"mula/xpu/comm"
	"mula/xpu/comm/mpi"
	"mula/xpu/comm/tcp"
)

// Transport names a transport between ranks.
type Transport string

// The transports.
const (
	Auto  Transport = "auto"  // mpi under mpiexec, tcp under mula launch, otherwise local; default
	Local Transport = "local" // ranks are goroutines of one process, which share its threads
	TCP   Transport = "tcp"   // ranks are processes that mula launch has started
	MPI   Transport = "mpi"   // ranks are processes that mpiexec has started
)

// Join connects to the other processes of a run, which mpiexec or mula launch has started.
// transport is the field layout.transport, and n the number of ranks of the layout. Join returns
// nil if the run has one process, whose ranks are goroutines. While ranks with the tcp transport
// are missing, Join calls waiting from time to time with a text that names them. The caller closes
// the group after the run has ended.
func Join(ctx context.Context, transport Transport, n int, waiting func(text string)) (*comm.Comm, error) {
	options, launched, err := tcp.FromEnvironment()
	kind, kindErr := transportOf(transport)
	if kindErr != nil {
		return nil, kindErr
	}
	var link comm.Transport
	switch {
	case kind == Local:
		return nil, startedWith(1)
	case kind == MPI:
		link, err = mpi.Init(ctx)
	case err != nil:
		return nil, err
	case !launched:
		return nil, &strictyaml.FieldError{Field: "layout.transport",
			Message: " is \"tcp\", but mula launch did not start this process; start the run with mula launch"}
	default:
		options.Waiting = waiting
		link, err = tcp.Join(ctx, options)
	}
	if err != nil {
		return nil, err
	}
	world := comm.New(link)
	err = startedWith(world.Size())
	if err == nil && kind == MPI && world.Size() == 1 && n > 1 {
		err = loneRank(link.Name())
	}
	if err != nil {
		world.Close()
		return nil, err
	}
	return world, nil
}

// transportOf returns the transport of this process: layout.transport, or for auto the transport
// from the environment. It returns an error in one of several processes that cannot find each
// other, because each of them would run the whole job.
func transportOf(kind Transport) (Transport, error) {
	process, started := launchers.Find()
	if kind == Auto {
		switch {
		case os.Getenv(tcp.RankVariable) != "":
			kind = TCP
		case os.Getenv(tcp.SizeVariable) == "1": // mula launch has started one process for all ranks
			kind = Local
		case mpi.Launched():
			kind = MPI
		case started && process.Size > 1:
			return "", separateProcesses(process)
		default:
			kind = Local
		}
	}
	if kind == MPI && !mpi.Launched() && started && process.Size > 1 {
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
		Message: fmt.Sprintf(": %s has started %d processes (%s), but without PMI for MPI, so each process would "+
			"train the whole run; %s. If each process is a separate run with its own output, set layout.transport to "+
			"local", p.Launcher.Name, p.Size, p.Launcher.Size, pmi)}
}

// startedWith returns an error if the size of the world differs from the number of ranks that mula
// launch has started.
func startedWith(size int) error {
	text := os.Getenv(tcp.SizeVariable)
	if n, err := strconv.Atoi(text); text == "" || err == nil && n == size {
		return nil
	}
	return &strictyaml.FieldError{Field: "layout.transport",
		Message: fmt.Sprintf(": mula launch has started %s ranks (%s), but this rank is in a world of size %d; use "+
			"the mpiexec or srun of the same MPI library, or mula launch --with tcp", text, tcp.SizeVariable, size)}
}

// loneRank is the error of a process whose MPI library sees no other process, although the layout
// has several ranks.
func loneRank(library string) error {
	p, _ := launchers.Find()
	return &strictyaml.FieldError{Field: "layout.transport",
		Message: fmt.Sprintf(": %s has started this process (%s), but %s sees no other process; name the MPI "+
			"library of %s in %s, or start the run with mula launch --with tcp",
			p.Launcher.Name, p.Launcher.Rank, library, p.Launcher.Name, mpi.LibraryVariable)}
}

// Group has the groups of a rank and the hosts of all ranks.
type Group struct {
	*comm.Mesh

	// Within exists for gradients in transit at the same time as tokens. Without tensor
	// parallelism, Across is the group [comm.Replicas]. With it, WithinTensor and Across exist only
	// with Options.Nested, and are nil otherwise.
	comm.Nested

	Stage *comm.Comm // the ranks of [comm.Data] again, for votes

	// Sequence has the ranks that share sequences: consecutive ranks of [comm.Data], which read the
	// same samples. Heads has those with the same slices of matrices.
	Sequence, Heads *comm.Comm

	// Back is a second communicator of [comm.PP], if stages have several groups of layers; or nil.
	Back *comm.Comm

	// Embeddings is another communicator of [comm.PP], with Options.Embeddings; or nil.
	Embeddings *comm.Comm

	Hosts   []string // of each rank
	sharing int      // ranks on the same processors of this host, including this rank

	count [1]int64
}

// Options are settings of a group.
type Options struct {
	Fast          bool        // for [comm.Comm.SetFast]
	InnerReplicas int         // for [comm.Mesh.SetInner]; 0 means 1
	SequenceRanks int         // ranks of Heads; 0 means 1
	VirtualStages int         // groups of layers of a pipeline stage; 0 means 1
	Embeddings    bool        // the first and the last pipeline stage exchange embeddings
	Nested        bool        // gradients are summed inside WithinTensor first, and then Across
	Hosts         *comm.Hosts // of all ranks, which then run in this process; nil: their machines
}

// nest sets WithinTensor and Across.
func (g *Group) nest(ctx context.Context, options Options) (err error) {
	switch {
	case g.Size(comm.TP) == 1:
		g.WithinTensor, g.Across = g.Within, g.Group(comm.Replicas)
		return nil
	case !options.Nested:
		return nil
	}
	if g.WithinTensor, err = g.Split(ctx, comm.EP|comm.TP); err != nil {
		return err
	}
	if g.Across, err = g.Split(ctx, comm.ExpertDP); err != nil {
		return err
	}
	g.Across.SetInner(max(1, options.InnerReplicas))
	return nil
}

// New creates the groups of a mesh from the world.
func New(ctx context.Context, world *comm.Comm, shape comm.Shape, options Options) (*Group, error) {
	mesh, err := comm.NewMesh(ctx, world, shape)
	if err != nil {
		return nil, err
	}
	g := &Group{Mesh: mesh}
	if g.Within, err = mesh.Split(ctx, comm.EP); err == nil {
		g.Stage, err = mesh.Split(ctx, comm.Data)
	}
	if err == nil {
		err = g.nest(ctx, options)
	}
	if err == nil {
		g.Sequence, err = mesh.Consecutive(ctx, comm.Data, max(1, options.SequenceRanks)*mesh.Size(comm.TP))
	}
	if g.Heads = g.Sequence; err == nil && mesh.Size(comm.TP) > 1 {
		g.Heads, err = mesh.Consecutive(ctx, comm.Slices, max(1, options.SequenceRanks))
	}
	if err == nil && options.VirtualStages > 1 {
		g.Back, err = mesh.Split(ctx, comm.PP)
	}
	if err == nil && options.Embeddings && mesh.Size(comm.PP) > 1 {
		g.Embeddings, err = mesh.Split(ctx, comm.PP)
	}
	if err != nil {
		g.Close()
		return nil, err
	}
	for _, group := range []*comm.Comm{g.Group(comm.Replicas), g.Group(comm.Slices), g.Group(comm.Data), g.Within,
		g.WithinTensor, g.Across} {
		if group != nil {
			group.SetFast(options.Fast)
		}
	}
	mesh.SetInner(max(1, options.InnerReplicas))
	hosts := options.Hosts
	if hosts == nil {
		if hosts, err = g.gatherHosts(ctx); err != nil {
			g.Close()
			return nil, err
		}
	} else {
		g.sharing = world.Size()
	}
	g.Hosts = hosts.Names()
	mesh.SetHosts(hosts)
	return g, nil
}

// gatherHosts gathers the hosts of all ranks.
func (g *Group) gatherHosts(ctx context.Context) (*comm.Hosts, error) {
	type location struct{ Host, Processors string }
	own := location{collective.Hostname(), processors()}
	locations, err := collective.Gather(ctx, g.World(), own)
	if err != nil {
		return nil, err
	}
	var names []string
	for _, l := range locations {
		names = append(names, l.Host)
		if l == own {
			g.sharing++
		}
	}
	return comm.NewHosts(names), nil
}

// Readers returns the number of parts into which the samples of a step are divided. Ranks of other
// pipeline stages and ranks that share sequences read the same part.
func (g *Group) Readers() int { return g.Size(comm.Data) / g.Sequence.Size() }

// Reader returns the number of this rank's part of the samples.
func (g *Group) Reader() int { return g.ReaderOf(g.Rank()) }

// ReaderOf returns the number of a rank's part of the samples.
func (g *Group) ReaderOf(rank int) int { return g.Index(rank, comm.Data) / g.Sequence.Size() }

// Machines returns the number of machines on which the ranks run.
func (g *Group) Machines() int {
	seen := map[string]bool{}
	for _, host := range g.Hosts {
		seen[host] = true
	}
	return len(seen)
}

// OnHost returns the number of ranks on this rank's host.
func (g *Group) OnHost() int {
	n := 0
	for _, host := range g.Hosts {
		if host == g.Hosts[g.Rank()] {
			n++
		}
	}
	return n
}

// NumberOnHost returns this rank's number among the ranks on its host.
func (g *Group) NumberOnHost() int {
	n := 0
	for _, host := range g.Hosts[:g.Rank()] {
		if host == g.Hosts[g.Rank()] {
			n++
		}
	}
	return n
}

// Sum returns the sum of a number of each rank, on all ranks.
func (g *Group) Sum(ctx context.Context, n int64) (int64, error) {
	g.count[0] = n
	err := comm.AllReduce(ctx, g.World(), g.count[:])
	return g.count[0], err
}

// All returns the numbers of all ranks on every rank.
func (g *Group) All(ctx context.Context, n int64) ([]int64, error) {
	numbers, bounds := make([]int64, g.Ranks()), make([]int, g.Ranks()+1)
	for i := range bounds {
		bounds[i] = i
	}
	numbers[g.Rank()] = n
	return numbers, comm.AllGather(ctx, g.World(), numbers, bounds)
}

// Threads returns the number of threads of this rank's device. Ranks on the same processors share
// the threads of the process evenly. n is the field threads. A number from this field or from the
// environment is per process.
func (g *Group) Threads(n, ranksHere int) int {
	switch {
	case g.Ranks() == 1:
		return n
	case n == 0 && (ranksHere > 1 || os.Getenv("GOMAXPROCS") == ""):
		return max(1, runtime.GOMAXPROCS(0)/g.sharing)
	case n == 0:
		return runtime.GOMAXPROCS(0)
	}
	return max(1, n/max(1, ranksHere))
}
