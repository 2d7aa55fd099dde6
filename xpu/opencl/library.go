package opencl

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"runtime"
	"sync"
	"unsafe"

	"mula/internal/sharedlib"
	"mula/internal/signals"
)

// LibraryVariable is the environment variable that names the OpenCL loader if mula does not find
// it.
const LibraryVariable = "MULA_OPENCL_LIB"

// search defines where the loader is looked up.
var search = sharedlib.Search{Variable: LibraryVariable, Names: []string{"libOpenCL.so.1"}}

// supported reports whether mula opens the loader on this system: package signals must be able to
// restore signal handlers that drivers replace.
const supported = runtime.GOOS == "linux" && (runtime.GOARCH == "amd64" || runtime.GOARCH == "arm64")

// Constants of the C interface (CL/cl.h, CL/cl_ext.h).
const (
	platformVersion, platformName = 0x0901, 0x0902

	deviceTypeAll                                          = 0xFFFFFFFF
	deviceType, deviceComputeUnits, deviceMaxWorkGroup     = 0x1000, 0x1002, 0x1004
	deviceClock, deviceMaxAllocation, deviceMemory         = 0x100C, 0x1010, 0x101F
	deviceLocalMemory, deviceLittleEndian, deviceAvailable = 0x1023, 0x1026, 0x1027
	deviceCompiler, deviceName, deviceVendor               = 0x1028, 0x102B, 0x102C
	driverVersion, deviceVersion, deviceExtensions         = 0x102D, 0x102F, 0x1030
	deviceMaxSubGroups, deviceSubGroupSizes                = 0x105C, 0x4108
	deviceMajor, deviceMinor                               = 0x4000, 0x4001 // of cl_nv_device_attribute_query
	deviceMaxSubDevices, deviceAffinityDomains             = 0x1043, 0x1045
	partitionByAffinityDomain, affinityNUMA                = 0x1088, 1 << 0
	typeCPU, typeGPU, typeAccelerator                      = 1 << 1, 1 << 2, 1 << 3
	queueProfiling, memoryReadWrite, memoryAllocateHost    = 1 << 1, 1 << 0, 1 << 4
	mapRead, mapWrite                                      = 1 << 0, 1 << 1
	programBinarySizes, programBinaries, programBuildLog   = 0x1165, 0x1166, 0x1183
	kernelArguments, argumentAddress, argumentTypeName     = 0x1191, 0x1196, 0x1198
	addressGlobal, addressLocal, addressConstant           = 0x119B, 0x119C, 0x119D
	kernelWorkGroupSize                                    = 0x11B0
	eventStatus                                            = 0x11D3
	eventQueued, eventSubmitted, eventStarted, eventEnded  = 0x1280, 0x1281, 0x1282, 0x1283
	codeDeviceNotFound, codePlatformNotFound               = -1, -1001
)

// calls are the functions of the loader, all of OpenCL 1.2; a field F is the function clF. A
// pointer that a function keeps after its return must be pinned until then. Other pointers are on
// the heap, because these are function values, and stay alive during the call.
type calls struct {
	GetPlatformIDs  func(size uint32, platforms *uintptr, count *uint32) int32
	GetPlatformInfo func(platform uintptr, what uint32, size uintptr, value unsafe.Pointer,
		bytes *uintptr) int32
	GetDeviceIDs  func(platform uintptr, kind uint64, size uint32, devices *uintptr, count *uint32) int32
	GetDeviceInfo func(device uintptr, what uint32, size uintptr, value unsafe.Pointer,
		bytes *uintptr) int32
	CreateSubDevices func(device uintptr, properties *uintptr, size uint32, devices *uintptr, count *uint32) int32
	CreateContext    func(properties *uintptr, count uint32, devices *uintptr, notify, data uintptr,
		code *int32) uintptr
	ReleaseContext          func(context uintptr) int32
	CreateCommandQueue      func(context, device uintptr, properties uint64, code *int32) uintptr
	ReleaseCommandQueue     func(queue uintptr) int32
	CreateBuffer            func(context uintptr, flags uint64, bytes, host uintptr, code *int32) uintptr
	ReleaseMemObject        func(buffer uintptr) int32
	CreateProgramWithSource func(context uintptr, count uint32, texts **byte, lengths *uintptr, code *int32) uintptr
	CreateProgramWithBinary func(context uintptr, count uint32, devices, lengths *uintptr, binaries **byte, status,
		code *int32) uintptr
	BuildProgram func(program uintptr, count uint32, devices *uintptr, options *byte, notify,
		data uintptr) int32
	GetProgramInfo func(program uintptr, what uint32, size uintptr, value unsafe.Pointer,
		bytes *uintptr) int32
	GetProgramBuildInfo func(program, device uintptr, what uint32, size uintptr, value unsafe.Pointer,
		bytes *uintptr) int32
	ReleaseProgram func(program uintptr) int32
	CreateKernel   func(program uintptr, name *byte, code *int32) uintptr
	GetKernelInfo  func(kernel uintptr, what uint32, size uintptr, value unsafe.Pointer,
		bytes *uintptr) int32
	GetKernelArgInfo func(kernel uintptr, index, what uint32, size uintptr, value unsafe.Pointer,
		bytes *uintptr) int32
	GetKernelWorkGroupInfo func(kernel, device uintptr, what uint32, size uintptr, value unsafe.Pointer,
		bytes *uintptr) int32
	SetKernelArg         func(kernel uintptr, index uint32, size uintptr, value unsafe.Pointer) int32
	ReleaseKernel        func(kernel uintptr) int32
	EnqueueNDRangeKernel func(queue, kernel uintptr, dimensions uint32, offset, global, local *uintptr,
		waits uint32, wait, event *uintptr) int32
	EnqueueReadBuffer func(queue, buffer uintptr, blocking uint32, offset, bytes uintptr, to unsafe.Pointer,
		waits uint32, wait, event *uintptr) int32
	EnqueueWriteBuffer func(queue, buffer uintptr, blocking uint32, offset, bytes uintptr, from unsafe.Pointer,
		waits uint32, wait, event *uintptr) int32
	EnqueueFillBuffer func(queue, buffer uintptr, pattern unsafe.Pointer, size, offset, bytes uintptr,
		waits uint32, wait, event *uintptr) int32
	EnqueueCopyBuffer func(queue, from, to uintptr, fromOffset, toOffset, bytes uintptr, waits uint32, wait,
		event *uintptr) int32
	EnqueueMapBuffer func(queue, buffer uintptr, blocking uint32, flags uint64, offset, bytes uintptr, waits uint32,
		wait, event *uintptr, code *int32) unsafe.Pointer
	EnqueueUnmapMemObject func(queue, buffer uintptr, mapped unsafe.Pointer, waits uint32, wait,
		event *uintptr) int32
	Flush                      func(queue uintptr) int32
	EnqueueMarkerWithWaitList  func(queue uintptr, waits uint32, wait, event *uintptr) int32
	EnqueueBarrierWithWaitList func(queue uintptr, waits uint32, wait, event *uintptr) int32
	CreateUserEvent            func(context uintptr, code *int32) uintptr
	SetUserEventStatus         func(event uintptr, status int32) int32
	WaitForEvents              func(count uint32, events *uintptr) int32
	GetEventInfo               func(event uintptr, what uint32, size uintptr, value unsafe.Pointer,
		bytes *uintptr) int32
	GetEventProfilingInfo func(event uintptr, what uint32, size uintptr, value unsafe.Pointer,
		bytes *uintptr) int32
	ReleaseEvent func(event uintptr) int32
}

// A library is an opened loader. It is never closed, because drivers have threads.
type library struct {
	name string
	calls
	tiles map[uintptr][]uintptr // sub-devices of devices, guarded by asking
}

// opened are the libraries of this process, by the value of the environment variable.
var (
	openedMu sync.Mutex
	opened   = map[string]*library{}
)

// handlers are the signal handlers from before the first driver was loaded. PoCL 3.1 replaces them
// when devices are first listed; drivers may replace them whenever they compile.
var handlers = sync.OnceValue(signals.Keep)

// open finds and opens the loader.
func open() (*library, error) {
	openedMu.Lock()
	defer openedMu.Unlock()
	named := os.Getenv(LibraryVariable)
	if l := opened[named]; l != nil {
		return l, nil
	}
	where := LibraryVariable + " is set to it"
	if named == "" {
		where = "install it (Debian and Ubuntu: ocl-icd-libopencl1), or set " + LibraryVariable + " to its path"
	}
	if !supported {
		return nil, fmt.Errorf("opencl: no OpenCL loader: %s/%s is not supported, only Linux with "+
			"amd64 or arm64; %s", runtime.GOOS, runtime.GOARCH, where)
	}
	handlers()
	file, err := search.Open()
	if err != nil {
		return nil, fmt.Errorf("opencl: no OpenCL loader: %w; %s", err, where)
	}
	l := &library{name: file.Name}
	functions := reflect.ValueOf(&l.calls).Elem()
	for i := range functions.NumField() {
		function := "cl" + functions.Type().Field(i).Name
		address, err := file.Symbol(function)
		if err != nil {
			return nil, fmt.Errorf("opencl: %w; install an OpenCL loader of version 1.2 or later", err)
		}
		switch function {
		case "clSetKernelArg":
			l.SetKernelArg = fastSetKernelArg(address)
		case "clEnqueueNDRangeKernel":
			l.EnqueueNDRangeKernel = fastEnqueueNDRangeKernel(address)
		default:
			sharedlib.Register(functions.Field(i).Addr().Interface(), address)
		}
	}
	opened[named] = l
	return l, nil
}

// A launch calls two functions, one of them for each argument. Calling them by reflection, like
// [sharedlib.Register], would cost more than some kernels.

func fastSetKernelArg(function uintptr) func(kernel uintptr, index uint32, size uintptr, value unsafe.Pointer) int32 {
	return func(kernel uintptr, index uint32, size uintptr, value unsafe.Pointer) int32 {
		code, _, _ := sharedlib.Call(function, kernel, uintptr(index), size, uintptr(value))
		return int32(code)
	}
}

func fastEnqueueNDRangeKernel(function uintptr) func(queue, kernel uintptr, dimensions uint32, offset, global,
	local *uintptr, waits uint32, wait, event *uintptr) int32 {
	return func(queue, kernel uintptr, dimensions uint32, offset, global, local *uintptr, waits uint32, wait,
		event *uintptr) int32 {
		code, _, _ := sharedlib.Call(function, queue, kernel, uintptr(dimensions), uintptr(unsafe.Pointer(offset)),
			uintptr(unsafe.Pointer(global)),
			uintptr(unsafe.Pointer(local)), uintptr(waits), uintptr(unsafe.Pointer(wait)),
			uintptr(unsafe.Pointer(event)))
		return int32(code)
	}
}

// An Error is the error code of an OpenCL function.
type Error struct {
	Call string // for example clCreateBuffer
	Code int32  // below 0
}

// Error returns for example "clCreateBuffer: CL_OUT_OF_RESOURCES (-5)".
func (e *Error) Error() string { return fmt.Sprintf("%s: %s (%d)", e.Call, e.Name(), e.Code) }

// Name returns the code's name in CL/cl.h, for example CL_OUT_OF_RESOURCES, or "unknown error".
func (e *Error) Name() string {
	if name := codeNames[e.Code]; name != "" {
		return name
	}
	return "unknown error"
}

var codeNames = map[int32]string{
	-1: "CL_DEVICE_NOT_FOUND", -2: "CL_DEVICE_NOT_AVAILABLE", -3: "CL_COMPILER_NOT_AVAILABLE",
	-4: "CL_MEM_OBJECT_ALLOCATION_FAILURE",
	-5: "CL_OUT_OF_RESOURCES", -6: "CL_OUT_OF_HOST_MEMORY", -7: "CL_PROFILING_INFO_NOT_AVAILABLE",
	-8:  "CL_MEM_COPY_OVERLAP",
	-11: "CL_BUILD_PROGRAM_FAILURE", -12: "CL_MAP_FAILURE", -13: "CL_MISALIGNED_SUB_BUFFER_OFFSET",
	-14: "CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST", -15: "CL_COMPILE_PROGRAM_FAILURE",
	-16: "CL_LINKER_NOT_AVAILABLE",
	-17: "CL_LINK_PROGRAM_FAILURE", -18: "CL_DEVICE_PARTITION_FAILED", -19: "CL_KERNEL_ARG_INFO_NOT_AVAILABLE",
	-30: "CL_INVALID_VALUE", -31: "CL_INVALID_DEVICE_TYPE", -32: "CL_INVALID_PLATFORM", -33: "CL_INVALID_DEVICE",
	-34: "CL_INVALID_CONTEXT",
	-35: "CL_INVALID_QUEUE_PROPERTIES", -36: "CL_INVALID_COMMAND_QUEUE", -37: "CL_INVALID_HOST_PTR",
	-38: "CL_INVALID_MEM_OBJECT",
	-42: "CL_INVALID_BINARY", -43: "CL_INVALID_BUILD_OPTIONS", -44: "CL_INVALID_PROGRAM",
	-45: "CL_INVALID_PROGRAM_EXECUTABLE",
	-46: "CL_INVALID_KERNEL_NAME", -47: "CL_INVALID_KERNEL_DEFINITION", -48: "CL_INVALID_KERNEL",
	-49: "CL_INVALID_ARG_INDEX",
	-50: "CL_INVALID_ARG_VALUE", -51: "CL_INVALID_ARG_SIZE", -52: "CL_INVALID_KERNEL_ARGS",
	-53: "CL_INVALID_WORK_DIMENSION",
	-54: "CL_INVALID_WORK_GROUP_SIZE", -55: "CL_INVALID_WORK_ITEM_SIZE", -56: "CL_INVALID_GLOBAL_OFFSET",
	-57: "CL_INVALID_EVENT_WAIT_LIST",
	-58: "CL_INVALID_EVENT", -59: "CL_INVALID_OPERATION", -61: "CL_INVALID_BUFFER_SIZE",
	-63: "CL_INVALID_GLOBAL_WORK_SIZE",
	-64: "CL_INVALID_PROPERTY", -66: "CL_INVALID_COMPILER_OPTIONS", -67: "CL_INVALID_LINKER_OPTIONS",
	-72:   "CL_MAX_SIZE_RESTRICTION_EXCEEDED",
	-1001: "CL_PLATFORM_NOT_FOUND_KHR",
}

// check converts the result of a function to an error.
func check(call string, code int32) error {
	if code == 0 {
		return nil
	}
	return &Error{call, code}
}

// maxAnswer limits the size of a value returned by a driver, so that a broken driver does not fill
// the memory.
const maxAnswer = 1 << 30

// ask gets a value of any size from a clGet…Info function.
func ask(call string, get func(size uintptr, value unsafe.Pointer, bytes *uintptr) int32) ([]byte, error) {
	var n uintptr
	if err := check(call, get(0, nil, &n)); err != nil {
		return nil, err
	}
	if n > maxAnswer {
		return nil, fmt.Errorf("%s: value of %d bytes is too large", call, n)
	}
	if n == 0 {
		return nil, nil
	}
	value := make([]byte, n)
	return value, check(call, get(n, unsafe.Pointer(&value[0]), nil))
}

// askNumber gets a value of the size of a T.
func askNumber[T int32 | uint32 | uint64 | uintptr](call string, get func(size uintptr, value unsafe.Pointer,
	bytes *uintptr) int32) (T, error) {
	value := new(T)
	err := check(call, get(unsafe.Sizeof(*value), unsafe.Pointer(value), nil))
	return *value, err
}

// isCode reports whether err has the given OpenCL code.
func isCode(err error, code int32) bool {
	var e *Error
	return errors.As(err, &e) && e.Code == code
}
