// Package mpi links ranks by the MPI library of the machine. It is opened when it is needed, at run
// time: one program works with Open MPI and with all libraries that have the ABI of MPICH (Intel
// MPI, those of Cray and of Aurora), and without any.
//
// Every exchange is made of non-blocking messages between two ranks, which are asked for their end
// until they are done, at first without a pause and then with longer and longer ones: many ranks
// can share few cores, and a done context ends a wait.
package mpi

import (
	"os"

	"mula/internal/launchers"
)

// LibraryVariable is the environment variable that names the MPI library, if it is not found by
// itself.
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

// Launched says whether this process was started by an mpiexec, srun or the like, judging by its
// environment.
func Launched() bool {
	for _, l := range launchers.All {
		if l.MPI && os.Getenv(l.Rank) != "" {
			return true
		}
	}
	return false
}
