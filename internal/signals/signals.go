// Package signals keeps the handlers of signals that are Go's, where C libraries take them over:
// MPI libraries and what they load (UCX) those of faults, to print where a program has crashed; the
// LLVM in OpenCL drivers those that end a program, to remove its files, and SIGUSR1, which is then
// lost. In Go they are panics and requests to stop, and belong to its runtime. On systems where no
// library is opened there is nothing to do.
package signals
