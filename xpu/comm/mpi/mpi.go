// Package mpi connects ranks with the machine's MPI library, which it opens at run time, when
// needed. One program works with Open MPI, with all libraries that have the ABI of MPICH (Intel
// MPI, the libraries of Cray and of Aurora), and without an MPI library.
//
// Every exchange consists of non-blocking messages between two ranks, which are polled until they
// are complete, first without and then with growing pauses. Many ranks can therefore share few
// cores, and a done context ends a wait.
package mpi

import (
	"os"

	"mula/internal/launchers"
)

// LibraryVariable is the environment variable that names the MPI library if mula does not find it.
const LibraryVariable = "MULA_MPI_LIB"

// A Family is a group of MPI libraries and launchers that work together.
type Family string

// The families. Intel MPI and the libraries of Cray and Aurora have the ABI of MPICH.
const (
	OpenMPI Family = "Open MPI"
	MPICH   Family = "MPICH"
)

// A Library describes an MPI library.
type Library struct {
	File, Version string
	Family        Family
}

// Launched reports whether this process was started by mpiexec, srun or another MPI launcher,
// according to its environment.
func Launched() bool {
	for _, l := range launchers.All {
		if l.MPI && os.Getenv(l.Rank) != "" {
			return true
		}
	}
	return false
}
