// Package launchers reads the rank of this process in its job from the environment variables that
// mpiexec, srun, torchrun and mula launch set.
package launchers

import (
	"os"
	"strconv"
	"strings"
)

// A Launcher is a program that starts the processes of a job.
type Launcher struct {
	Name string
	MPI  bool // the MPI library finds the other processes
	Rank string
	Size string // "" for a launcher that does not set the number of processes
	Here string // number of processes on this machine; "" for a launcher that does not set it
	only string // variable that the launcher always sets; if it is unset, the others do not count
}

// All are the launchers that mula knows. A process may have the variables of several, such as srun
// and its PMI.
var All = []Launcher{
	{Name: "mula launch", Rank: "MULA_RANK", Size: "MULA_WORLD"},
	{Name: "Open MPI", MPI: true, Rank: "OMPI_COMM_WORLD_RANK", Size: "OMPI_COMM_WORLD_SIZE",
		Here: "OMPI_COMM_WORLD_LOCAL_SIZE"},
	{Name: "MVAPICH2", MPI: true, Rank: "MV2_COMM_WORLD_RANK", Size: "MV2_COMM_WORLD_SIZE",
		Here: "MV2_COMM_WORLD_LOCAL_SIZE"},
	// MPICH, Intel MPI, srun --mpi=pmi2
	{Name: "PMI", MPI: true, Rank: "PMI_RANK", Size: "PMI_SIZE", Here: "MPI_LOCALNRANKS"},
	{Name: "PMIx", MPI: true, Rank: "PMIX_RANK"},   // prterun, srun --mpi=pmix
	{Name: "PALS", MPI: true, Rank: "PALS_RANKID"}, // HPE Cray machines
	// A batch script has SLURM_PROCID, but no number of tasks of a step.
	{Name: "srun", Rank: "SLURM_PROCID", Size: "SLURM_STEP_NUM_TASKS", Here: "SLURM_STEP_TASKS_PER_NODE"},
	{Name: "torchrun", Rank: "RANK", Size: "WORLD_SIZE", Here: "LOCAL_WORLD_SIZE", only: "TORCHELASTIC_RUN_ID"},
}

// A Process is one process of a job.
type Process struct {
	Launcher Launcher
	Rank     int
	Size     int // 0 if the launcher does not set it
	Here     int // processes on this machine; 1 if the launcher does not set it
}

// Find returns the rank of this process and the size of its job. It returns false if no known
// launcher started the process.
func Find() (Process, bool) { return FindIn(os.Getenv) }

// JobIn returns the rank and the size of the job of a process with the given environment. A process
// is rank 0 of 1 if no known launcher started it, or if its launcher does not set the size.
func JobIn(getenv func(string) string) Process {
	if p, ok := FindIn(getenv); ok && p.Size > 0 {
		return p
	}
	return Process{Size: 1, Here: 1}
}

// FindIn is Find with another environment. A launcher that does not set the number of processes
// counts only if no other launcher sets it.
func FindIn(getenv func(string) string) (Process, bool) {
	var first Process
	found := false
	for _, l := range All {
		p := Process{Launcher: l, Here: 1}
		var err error
		if p.Rank, err = strconv.Atoi(getenv(l.Rank)); err != nil || p.Rank < 0 || l.only != "" &&
			getenv(l.only) == "" {
			continue
		}
		if l.Size == "" {
			if !found {
				first, found = p, true
			}
			continue
		}
		if p.Size, err = strconv.Atoi(getenv(l.Size)); err != nil || p.Rank >= p.Size {
			continue
		}
		// Slurm writes "4(x2),3" for two machines with 4 tasks and one with 3.
		digits, _, _ := strings.Cut(getenv(l.Here), "(")
		digits, _, _ = strings.Cut(digits, ",")
		if n, err := strconv.Atoi(digits); err == nil && n > 0 {
			p.Here = n
		}
		return p, true
	}
	return first, found
}
