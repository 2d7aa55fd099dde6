package onednn

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"
	"unsafe"

	"mula/internal/sharedlib"
)

// Constants of the library's C interface, the same in versions 2 and 3 (dnnl_types.h).
const (
	engineCPU, streamDefault                      = 1, 1
	typeBF16, typeF32                             = 2, 3
	statusUnimplemented                           = 3
	queryName, queryScratchpad                    = 8, 136
	scratchpadUser                                = 1
	argSource, argDestination, argWeights, argPad = 1, 17, 33, 80
	runtimeSequential, runtimeOpenMP              = 1, 2

	descriptorBytes = 4096 // space for the descriptors of version 2, which the caller allocates: 696 and 2,800 bytes
)

// LibraryVariable is the environment variable that names the library file.
const LibraryVariable = "MULA_ONEDNN_LIB"

// library is an opened oneDNN with its tiles. All devices of a process share it, and it is never
// closed.
type library struct {
	version string
	major   int
	isa     uint32 // instruction set, a dnnl_cpu_isa_t
	engine  uintptr
	symbols map[string]uintptr
	sum     func(postOps uintptr, scale float32, zeroPoint, dataType int32) int32 // version 2 has the first two
	execute uintptr
	handle  uintptr // dnnl_memory_set_data_handle

	mu         sync.RWMutex
	primitives map[shape]*primitive // nil if the tile's order of sums differs
	references map[reference][probes][probes]float32
}

// functions lists the functions of both versions (0), and of one version (2 or 3).
var functions = map[int][]string{
	0: {"dnnl_engine_create", "dnnl_stream_create", "dnnl_primitive_attr_create", "dnnl_primitive_attr_destroy",
		"dnnl_primitive_attr_set_post_ops",
		"dnnl_primitive_attr_set_scratchpad_mode", "dnnl_post_ops_create", "dnnl_post_ops_destroy",
		"dnnl_post_ops_append_sum", "dnnl_primitive_create",
		"dnnl_primitive_desc_destroy", "dnnl_primitive_desc_query", "dnnl_primitive_desc_query_md",
		"dnnl_memory_create", "dnnl_memory_destroy",
		"dnnl_memory_desc_get_size", "dnnl_get_effective_cpu_isa", "dnnl_memory_set_data_handle",
		"dnnl_primitive_execute", "dnnl_primitive_destroy"},
	2: {"dnnl_memory_desc_init_by_strides", "dnnl_matmul_desc_init", "dnnl_primitive_desc_create"},
	3: {"dnnl_memory_desc_create_with_strides", "dnnl_matmul_primitive_desc_create"},
}

// opened are the libraries of this process, by the value of the environment variable.
var (
	openedMu sync.Mutex
	opened   = map[string]*library{}
)

// search returns where the library is looked up.
func search() sharedlib.Search {
	names := []string{"libdnnl.so.3", "libdnnl.so.2"}
	if runtime.GOOS == "darwin" {
		names = []string{"libdnnl.3.dylib", "libdnnl.2.dylib"}
	}
	return sharedlib.Search{Variable: LibraryVariable, Names: names}
}

// open finds and opens the library that the environment variable names, or one of the usual names.
func open() (*library, error) {
	openedMu.Lock()
	defer openedMu.Unlock()
	named := os.Getenv(LibraryVariable)
	if l := opened[named]; l != nil {
		return l, nil
	}
	if err := oneThread(); err != nil {
		return nil, err
	}
	file, err := search().Open()
	if err != nil {
		where := LibraryVariable + " is set to it"
		if named == "" {
			where = "install it (Debian and Ubuntu: libdnnl2 or libdnnl3), or set " + LibraryVariable + " to its path"
		}
		return nil, fmt.Errorf("onednn: no oneDNN library was found: %s could not be opened (%w); %s. The device "+
			"cpu needs no library",
			strings.Join(search().Candidates(), " and "), err, where)
	}
	l, err := load(file)
	if err != nil {
		return nil, fmt.Errorf("onednn: %s: %w. The device cpu needs no library", file.Name, err)
	}
	opened[named] = l
	return l, nil
}

// oneThread sets the number of threads that OpenMP reads from the environment when it is loaded. C
// libraries do not see changes of Go's own copy of the environment.
func oneThread() error {
	setenv, err := sharedlib.Loaded.Symbol("setenv")
	if err != nil {
		return fmt.Errorf("onednn: the environment of C libraries cannot be changed: %w", err)
	}
	name, one := []byte("OMP_NUM_THREADS\x00"), []byte("1\x00")
	sharedlib.Call(setenv, uintptr(unsafe.Pointer(&name[0])), uintptr(unsafe.Pointer(&one[0])), 1)
	return nil
}

// load looks up the functions, and rejects libraries that cannot be limited to the calling thread.
func load(file *sharedlib.Library) (*library, error) {
	l := &library{symbols: map[string]uintptr{}, primitives: map[shape]*primitive{},
		references: map[reference][probes][probes]float32{}}
	lookUp := func(names ...string) error {
		for _, name := range names {
			address, err := file.Symbol(name)
			if err != nil {
				return fmt.Errorf("symbol %s is missing; versions 2 and 3 of oneDNN have it", name)
			}
			l.symbols[name] = address
		}
		return nil
	}
	if err := lookUp("dnnl_version"); err != nil {
		return nil, err
	}
	address, _, _ := sharedlib.Call(l.symbols["dnnl_version"])
	version := **(**struct {
		major, minor, patch int32
		hash                uintptr
		cpuRuntime          uint32
	})(unsafe.Pointer(&address))
	l.major = int(version.major)
	l.version = fmt.Sprintf("%d.%d.%d", version.major, version.minor, version.patch)
	if l.major != 2 && l.major != 3 {
		return nil, fmt.Errorf("unsupported version %s; use version 2 or 3", l.version)
	}
	if err := errors.Join(lookUp(functions[0]...), lookUp(functions[l.major]...)); err != nil {
		return nil, err
	}
	switch version.cpuRuntime {
	case runtimeSequential:
	case runtimeOpenMP:
		// If each of the device's threads had its own OpenMP threads, there would be far too many.
		if threads, err := file.Symbol("omp_get_max_threads"); err == nil {
			if n, _, _ := sharedlib.Call(threads); int32(n) != 1 {
				return nil, fmt.Errorf("OpenMP was loaded earlier and has %d threads; start mula with "+
					"OMP_NUM_THREADS=1", int32(n))
			}
		}
	default:
		return nil, fmt.Errorf("version %s was built for a threading runtime (cpu_runtime %d) that mula cannot "+
			"limit to one thread; use a build for OpenMP or for one thread",
			l.version, version.cpuRuntime)
	}
	sharedlib.Register(&l.sum, l.symbols["dnnl_post_ops_append_sum"])
	l.execute, l.handle = l.symbols["dnnl_primitive_execute"], l.symbols["dnnl_memory_set_data_handle"]
	if err := l.call("dnnl_engine_create", uintptr(unsafe.Pointer(&l.engine)), engineCPU, 0); err != nil {
		return nil, err
	}
	isa, _, _ := sharedlib.Call(l.symbols["dnnl_get_effective_cpu_isa"])
	l.isa = uint32(isa)
	return l, nil
}

// A statusError is the error status of a library function.
type statusError struct {
	function string
	status   int32
}

func (e *statusError) Error() string {
	meaning := map[int32]string{1: "out of memory", 2: "invalid arguments", statusUnimplemented: "not implemented",
		5: "runtime error"}[e.status]
	if meaning == "" {
		meaning = "unknown"
	}
	return fmt.Sprintf("%s: status %d (%s)", e.function, e.status, meaning)
}

// call calls a function that returns a status.
//
//go:uintptrescapes
func (l *library) call(function string, args ...uintptr) error {
	if status, _, _ := sharedlib.Call(l.symbols[function], args...); int32(status) != 0 {
		return &statusError{function, int32(status)}
	}
	return nil
}
