// Package signals restores Go's signal handlers after C libraries have replaced them. MPI libraries
// and UCX replace the handlers of faults, to print a backtrace. The LLVM in OpenCL drivers replaces
// the handlers of terminating signals, to remove its files, and of SIGUSR1, which is then lost. In
// Go, faults are panics and the terminating signals are requests to stop, so the Go runtime must
// handle them. The package does nothing on systems where mula opens no libraries.
package signals
