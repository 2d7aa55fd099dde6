//go:build amd64 || arm64

package mpi

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"mula/internal/sharedlib"
	"mula/internal/signals"
)

// A handle is an MPI object: a pointer in Open MPI, a 32-bit number in the ABI of MPICH.
type handle uintptr

// Constants that the two ABIs share.
const (
	threadMultiple = 3
	undefined      = -32766 // result of MPI_Testsome: no request was active
	maxText        = 8192   // maximum length of MPI_Get_library_version and MPI_Error_string
)

// A library is an opened MPI library: its functions, and the differences between the ABIs. All
// addresses passed to the library are uintptr: MPI uses small numbers in place of some addresses,
// which Go may not hold in a pointer.
type library struct {
	path        string
	openMPI     bool
	world       handle
	bytes       handle // MPI_BYTE
	float       handle // MPI_FLOAT
	sum         handle // MPI_SUM
	inPlace     uintptr
	ignore      uintptr // MPI_STATUS_IGNORE
	anySource   int32
	handleBytes int // size of a handle in an array
	statusBytes int // size of an MPI_Status

	errorsReturn handle

	initThread      func(argc, argv uintptr, required int32, provided uintptr) int32
	finalize        func() int32
	libraryVersion  func(text, length uintptr) int32
	errorString     func(code int32, text, length uintptr) int32
	setErrorHandler func(comm, errhandler handle) int32
	commRank        func(comm handle, rank uintptr) int32
	commSize        func(comm handle, size uintptr) int32
	commSplit       func(comm handle, color, key int32, out uintptr) int32
	isend           func(data uintptr, count int32, datatype handle, to, tag int32, comm handle, request uintptr) int32
	irecv           func(data uintptr, count int32, datatype handle, from, tag int32, comm handle,
		request uintptr) int32
	recv func(data uintptr, count int32, datatype handle, from, tag int32, comm handle,
		status uintptr) int32
	iallreduce       func(send, recv uintptr, count int32, datatype, op, comm handle, request uintptr) int32
	testSome         func(count int32, requests, done, indices, statuses uintptr) int32
	cancel           func(request uintptr) int32
	iprobe           func(from, tag int32, comm handle, flag, status uintptr) int32
	getCount         func(status uintptr, datatype handle, count uintptr) int32
	statusSourceByte int // offset of MPI_SOURCE in an MPI_Status
	statusErrorByte  int // offset of MPI_ERROR
}

// open finds and opens the library. Its symbols are global, because libraries that it loads itself,
// such as Open MPI's components, look them up.
func open() (*library, error) {
	return openFor(os.Getenv, true)
}

// openFor opens the library that a process with the given environment uses.
func openFor(getenv func(string) string, global bool) (*library, error) {
	names := []string{"libmpi.so.12", "libmpich.so.12", "libmpi.so.40", "libmpi.so"}
	if getenv("OMPI_COMM_WORLD_SIZE") != "" {
		names = []string{"libmpi.so.40", "libmpi.so"}
	} else if getenv("PMI_RANK") == "" {
		names = []string{"libmpi.so.40", "libmpi.so.12", "libmpich.so.12", "libmpi.so"}
	}
	file, err := sharedlib.Search{Variable: LibraryVariable, Names: names, Global: global}.Open()
	if err != nil {
		return nil, fmt.Errorf("mpi: no MPI library found; install one, or set %s to its path (%w)", LibraryVariable,
			err)
	}
	l, err := bind(file)
	if err != nil {
		return nil, fmt.Errorf("mpi: %w: mula does not support this MPI library", err)
	}
	return l, nil
}

// Find opens the library that [Init] would open under a launcher, and reads its version. It does
// not initialize MPI. The error is [sharedlib.ErrMissing] if there is no library.
func Find(under Family) (Library, error) {
	handlers := signals.Keep()
	defer handlers.Restore()
	l, err := openFor(func(name string) string {
		switch {
		case under == OpenMPI && name == "OMPI_COMM_WORLD_SIZE", under == MPICH && name == "PMI_RANK":
			return "1"
		case under == "":
			return os.Getenv(name)
		}
		return ""
	}, false)
	if err != nil {
		return Library{}, err
	}
	version, err := l.version()
	found := Library{File: l.path, Version: version, Family: MPICH}
	if l.openMPI {
		found.Family = OpenMPI
	}
	return found, err
}

// bind looks up the library's functions and constants.
func bind(file *sharedlib.Library) (*library, error) {
	l := &library{path: file.Name}
	_, err := file.Symbol("ompi_mpi_comm_world")
	l.openMPI = err == nil
	for _, constant := range []struct {
		value *handle
		open  string // Open MPI: the address of this symbol
		mpich handle
	}{
		{&l.world, "ompi_mpi_comm_world", 0x44000000},
		{&l.bytes, "ompi_mpi_byte", 0x4c00010d},
		{&l.float, "ompi_mpi_float", 0x4c00040a},
		{&l.sum, "ompi_mpi_op_sum", 0x58000003},
		{&l.errorsReturn, "ompi_mpi_errors_return", 0x54000001},
	} {
		*constant.value = constant.mpich
		if l.openMPI {
			address, err := file.Symbol(constant.open)
			if err != nil {
				return nil, err
			}
			*constant.value = handle(address)
		}
	}
	if l.openMPI {
		l.inPlace, l.ignore, l.anySource, l.handleBytes = 1, 0, -1, 8
		l.statusBytes, l.statusSourceByte, l.statusErrorByte = 24, 0, 8
	} else {
		l.inPlace, l.ignore, l.anySource, l.handleBytes = ^uintptr(0), 1, -2, 4
		l.statusBytes, l.statusSourceByte, l.statusErrorByte = 20, 8, 16
	}
	for _, function := range []struct {
		name string
		f    any
	}{
		{"MPI_Init_thread", &l.initThread}, {"MPI_Finalize", &l.finalize},
		{"MPI_Get_library_version", &l.libraryVersion}, {"MPI_Error_string", &l.errorString},
		{"MPI_Comm_set_errhandler", &l.setErrorHandler},
		{"MPI_Comm_rank", &l.commRank}, {"MPI_Comm_size", &l.commSize}, {"MPI_Comm_split", &l.commSplit}, {"MPI_Isend",
			&l.isend},
		{"MPI_Irecv", &l.irecv}, {"MPI_Recv", &l.recv}, {"MPI_Iallreduce", &l.iallreduce}, {"MPI_Testsome",
			&l.testSome},
		{"MPI_Cancel", &l.cancel}, {"MPI_Iprobe", &l.iprobe}, {"MPI_Get_count", &l.getCount},
	} {
		address, err := file.Symbol(function.name)
		if err != nil {
			return nil, err
		}
		sharedlib.Register(function.f, address)
	}
	return l, nil
}

// check converts the result of a function to an error.
func (l *library) check(code int32, what string) error {
	if code == 0 {
		return nil
	}
	r := newResults()
	if l.errorString(code, r.address(&r.text[0]), r.address(&r.number)) != 0 {
		return fmt.Errorf("mpi: %s: error %d", what, code)
	}
	return fmt.Errorf("mpi: %s: %s", what, strings.TrimSpace(r.string()))
}

// version returns the library's name and version, as in "Open MPI 4.1.4".
func (l *library) version() (string, error) {
	r := newResults()
	if err := l.check(l.libraryVersion(r.address(&r.text[0]), r.address(&r.number)),
		"MPI_Get_library_version"); err != nil {
		return "", err
	}
	line, _, _ := strings.Cut(r.string(), "\n")
	line, _, _ = strings.Cut(line, ",") // in Open MPI the builder follows
	words := strings.Fields(strings.ReplaceAll(line, "Version:", ""))
	for i, word := range words {
		if len(word) > 1 && word[0] == 'v' && word[1] >= '0' && word[1] <= '9' {
			words[i] = word[1:]
		}
	}
	if len(words) == 0 {
		return "", errors.New("mpi: the library does not report its version")
	}
	return strings.Join(words, " "), nil
}

// results is memory that the library writes to. It must not be on a stack, which may move while the
// library uses its address.
type results struct {
	text   [maxText]byte
	number int32
	handle uint64
}

//go:noinline
func newResults() *results { return new(results) }

// address returns the address of a field of the results; the caller must keep the results alive.
func (*results) address(part any) uintptr {
	switch p := part.(type) {
	case *byte:
		return uintptr(unsafe.Pointer(p))
	case *int32:
		return uintptr(unsafe.Pointer(p))
	}
	return uintptr(unsafe.Pointer(part.(*uint64)))
}

// string returns the text of number bytes that was written.
func (r *results) string() string { return string(r.text[:min(max(r.number, 0), maxText)]) }

func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }
