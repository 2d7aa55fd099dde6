package doctor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"mula/internal/atomicfile"
	"mula/internal/locks"
	"mula/shards/facts"
)

const (
	// minSpace is less than any shard or checkpoint takes.
	minSpace = 100 << 20
	// lowSpace is less than a checkpoint of a model of 1 G parameters takes (12 GB) with its
	// successor.
	lowSpace = 20 << 30
	// lowInodes is roughly the number of files of a large index cache.
	lowInodes = 10_000
	// slowSync: every output costs two of them. A cache of 1,000 index files then waits for two
	// minutes.
	slowSync = 60 * time.Millisecond
	// slowCreate: a tokenize job of 10,000 units then waits for its segments for more than three
	// minutes.
	slowCreate = 20 * time.Millisecond
	// slowStat: opening a plan of 10,000 shards asks for 30,000 files.
	slowStat = 5 * time.Millisecond
	// slowBytes is the rate at which `mula tokenize` reads and writes on two cores.
	slowBytes = 50e6
	// slowPiece is the longest time that the speed of one direction is measured.
	slowPiece = time.Second
	// pieces is the number of MiB that are written and read.
	pieces = 32
	// repeats is the number of calls whose median is a latency.
	repeats = 9
	// longName is the longest name of a file on common file systems.
	longName = 255
)

var folderChecks = []check{
	{"write", "all outputs", checkWrite, true},
	{"space", "all outputs", checkSpace, false},
	{"exclusive create", "locks, temporary files", checkExclusive, false},
	{"rename", "all outputs, checkpoints", checkRename, false},
	{"hard links", "locks of shared jobs", checkLinks, false},
	{"file locks", "runs, mula launch", checkLocks, false},
	{"fsync", "all outputs", checkSync, false},
	{"mmap", "shards", checkMap, false},
	{"file times", "locks, the shard cache", checkTimes, false},
	{"file clock", "temporary files, the shard cache", checkFileClock, false},
	{"long names", "temporary files", checkLongNames, false},
	{"case of names", "names of shards", checkCase, false},
	{"permissions", "mula serve --socket, tokens", checkPermissions, false},
	{"create latency", "tokenize jobs, index caches", checkCreateLatency, false},
	{"stat latency", "plans of many shards", checkStatLatency, false},
	{"write speed", "tokenize, checkpoints", checkWriteSpeed, false},
	{"read speed", "streams, training", checkReadSpeed, false},
}

// sameFolderChecks are for a folder on a file system that was checked before.
var sameFolderChecks = []check{folderChecks[0], folderChecks[1], {"file system", "", func(_ context.Context,
	p *probe) Result {
	return ok("the same as of %s", p.same)
}, false}}

// localDisk is the remedy for a file system that lacks a property.
const localDisk = "use a local disk, or another mount of this file system"

// reason is the system's error without the temporary path.
func reason(err error) error {
	var path *fs.PathError
	if errors.As(err, &path) {
		return path.Err
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}

func (p *probe) file(name string) string { return filepath.Join(p.temp, name) }

// write creates a file.
func (p *probe) write(name, text string) error {
	f, err := p.Files.Create(p.file(name))
	if err != nil {
		return err
	}
	_, err = f.Write([]byte(text))
	return errors.Join(err, f.Close())
}

func checkSpace(_ context.Context, p *probe) Result {
	u, err := p.Files.Usage(p.folder)
	if err != nil {
		return failure("name an existing folder", "%v", reason(err))
	}
	text := size(u.FreeBytes) + " free"
	if u.Inodes > 0 {
		text += ", " + count(u.FreeInodes) + " inodes"
	}
	const remedy = "remove files, or use another file system"
	switch {
	case u.FreeBytes < minSpace, u.Inodes > 0 && u.FreeInodes == 0:
		return failure(remedy, "%s", text)
	case u.FreeBytes < lowSpace, u.Inodes > 0 && u.FreeInodes < lowInodes:
		return warning(remedy, "%s", text)
	}
	return ok("%s", text)
}

func checkWrite(_ context.Context, p *probe) Result {
	temp, err := p.Files.MkdirTemp(p.folder)
	if err == nil {
		p.temp = temp
		err = p.write("first", "text")
	}
	switch {
	case errors.Is(err, syscall.EROFS):
		return failure("mount it for writing, or write outputs to another folder", "read-only file system")
	case errors.Is(err, fs.ErrPermission):
		return failure("change its mode or owner, or write outputs to another folder", "this user may not write")
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return failure("create the folder", "not a folder")
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return failure("remove files, or raise the quota", "%v", reason(err))
	case err != nil:
		return failure(localDisk, "%v", reason(err))
	}
	return ok("files and folders can be created")
}

func checkExclusive(_ context.Context, p *probe) Result {
	if err := p.write("exclusive", "a"); err != nil {
		return failure(localDisk, "%v", reason(err))
	}
	err := p.write("exclusive", "b")
	if err == nil {
		return failure(localDisk, "an existing file was created again")
	}
	if !errors.Is(err, fs.ErrExist) {
		return failure(localDisk, "%v", reason(err))
	}
	return ok("works (O_EXCL)")
}

func checkRename(_ context.Context, p *probe) Result {
	err := errors.Join(p.write("old", "old"), p.write("new", "new"), p.Files.Mkdir(p.file("folder")))
	if err != nil {
		return failure(localDisk, "%v", reason(err))
	}
	// A reader keeps the old file.
	data, release, err := p.Files.Map(p.file("old"))
	if err == nil {
		defer release()
	} else {
		data = []byte("old") // another line reports mmap
	}
	err = p.Files.Rename(p.file("new"), p.file("old"))
	if err == nil {
		err = p.Files.Rename(p.file("folder"), p.file("renamed folder"))
	}
	if err != nil {
		return failure(localDisk, "%v", reason(err))
	}
	text, err := p.Files.Read(p.file("old"))
	if err != nil || string(text) != "new" || string(data) != "old" {
		return failure(localDisk, "a replaced file has the wrong content for its readers")
	}
	return ok("replaces files, moves folders")
}

func checkLinks(_ context.Context, p *probe) Result {
	const remedy = "works without, but start one process at a time here: a killed one blocks others for a minute"
	err := p.write("source", "text")
	if err == nil {
		err = p.Files.Link(p.file("source"), p.file("link"))
	}
	if err != nil {
		return warning(remedy, "not supported: %v", reason(err))
	}
	if err = p.Files.Link(p.file("source"), p.file("link")); !errors.Is(err, fs.ErrExist) {
		return failure(localDisk, "a link replaced an existing file")
	}
	return ok("supported")
}

func checkLocks(_ context.Context, p *probe) Result {
	const remedy = "mount with flock (Lustre: -o flock), or use a local disk for runs"
	first, err := p.Files.Lock(p.file("lock"))
	if err != nil {
		return failure(remedy, "not supported: %v", reason(err))
	}
	defer first.Close()
	second, err := p.Files.Lock(p.file("lock"))
	if err == nil {
		second.Close()
		return failure(remedy, "two processes can lock the same file")
	}
	if !errors.Is(err, locks.ErrHeld) {
		return failure(remedy, "%v", reason(err))
	}
	return ok("supported (flock)")
}

// median is the median time of calls, which end early if they take long.
func (p *probe) median(ctx context.Context, call func(i int) error) (time.Duration, error) {
	var times []time.Duration
	begin := p.Clock.Monotonic()
	for i := 0; i < repeats && (i == 0 || p.Clock.Monotonic()-begin < slowPiece); i++ {
		if err := ctx.Err(); err != nil {
			return 0, err
		}
		start := p.Clock.Monotonic()
		if err := call(i); err != nil {
			return 0, err
		}
		times = append(times, p.Clock.Monotonic()-start)
	}
	slices.Sort(times)
	return times[len(times)/2], nil
}

// latency judges the median time of a call.
func latency(d time.Duration, err error, slow time.Duration, what string) Result {
	const digits = 10 * time.Microsecond
	switch {
	case err != nil:
		return failure(localDisk, "%v", reason(err))
	case d > slow:
		return warning("use a faster disk for caches and jobs; large outputs are affected less",
			"%v for %s, more than %v", d.Round(digits), what, slow)
	}
	return ok("%v for %s", max(d.Round(digits), digits), what)
}

func checkSync(ctx context.Context, p *probe) Result {
	d, err := p.median(ctx, func(i int) error {
		f, err := p.Files.Create(p.file(fmt.Sprint("sync", i)))
		if err != nil {
			return err
		}
		_, err = f.Write(make([]byte, 4096))
		return errors.Join(err, f.Sync(), f.Close(), p.Files.SyncDir(p.temp))
	})
	return latency(d, err, slowSync, "a file and its folder")
}

func checkMap(_ context.Context, p *probe) Result {
	text := strings.Repeat("0123456789", 1000)
	err := p.write("mapped", text)
	if err == nil {
		var data []byte
		var release func() error
		if data, release, err = p.Files.Map(p.file("mapped")); err == nil {
			defer release()
			if string(data) != text {
				err = errors.New("mapped bytes differ from the file")
			}
		}
	}
	if err != nil {
		return failure("copy shards to another file system", "%v", reason(err))
	}
	return ok("works")
}

func checkTimes(_ context.Context, p *probe) Result {
	const remedy = "do not share this folder between machines: locks of live processes look stale"
	if err := p.write("times", "a"); err != nil {
		return failure(localDisk, "%v", reason(err))
	}
	at := time.Unix(1_700_000_001, 123_456_789)
	if err := p.Files.Chtimes(p.file("times"), at); err != nil {
		return failure(remedy, "times cannot be set: %v", reason(err))
	}
	info, err := p.Files.Stat(p.file("times"))
	if err != nil {
		return failure(localDisk, "%v", reason(err))
	}
	if off := info.ModTime().Sub(at).Abs(); off > facts.Settled {
		return warning(remedy, "off by %v, more than %v", off, facts.Settled)
	} else if off > time.Microsecond {
		return ok("exact to %v", (off + time.Millisecond - 1).Round(time.Millisecond))
	}
	return ok("exact to a microsecond")
}

func checkFileClock(_ context.Context, p *probe) Result {
	before := p.Clock.Wall()
	if err := p.write("clock", "a"); err != nil {
		return failure(localDisk, "%v", reason(err))
	}
	info, err := p.Files.Stat(p.file("clock"))
	if err != nil {
		return failure(localDisk, "%v", reason(err))
	}
	off := info.ModTime().Sub(before)
	const remedy = "synchronize the clocks of this machine and of the file server (chrony, ntpd)"
	switch {
	case off.Abs() > atomicfile.AbandonedAfter/2:
		return failure(remedy, "differs by %v: files in use look abandoned", off.Round(time.Second))
	case off.Abs() > facts.Settled:
		return warning(remedy, "differs from this machine's clock by %v", off.Round(time.Millisecond))
	}
	return ok("agrees with this machine's to %v", facts.Settled)
}

func checkLongNames(_ context.Context, p *probe) Result {
	if err := p.write(strings.Repeat("n", longName), "a"); err != nil {
		return warning("keep names of shards and outputs below 80 bytes", "names of %d bytes fail: "+
			"%v", longName, reason(err))
	}
	return ok("%d bytes", longName)
}

func checkCase(_ context.Context, p *probe) Result {
	if err := p.write("case", "a"); err != nil {
		return failure(localDisk, "%v", reason(err))
	}
	if _, err := p.Files.Stat(p.file("CASE")); err == nil {
		return warning("give shards and runs names that differ in more than case", "names are equal in any case")
	}
	return ok("upper and lower case differ")
}

func checkPermissions(_ context.Context, p *probe) Result {
	const remedy = "keep sockets and token files on another file system"
	err := p.write("mode", "a")
	if err == nil {
		err = p.Files.Chmod(p.file("mode"), 0o600)
	}
	if err != nil {
		return warning(remedy, "modes cannot be set: %v", reason(err))
	}
	info, err := p.Files.Stat(p.file("mode"))
	if err != nil {
		return failure(localDisk, "%v", reason(err))
	}
	if mode := info.Mode().Perm(); mode != 0o600 {
		return warning(remedy, "mode %04o instead of 0600: others may read", mode)
	}
	return ok("modes are kept")
}

func checkCreateLatency(ctx context.Context, p *probe) Result {
	d, err := p.median(ctx, func(i int) error {
		name := fmt.Sprint("created", i)
		return errors.Join(p.write(name, "a"), p.Files.Rename(p.file(name), p.file("final")))
	})
	return latency(d, err, slowCreate, "create and rename")
}

func checkStatLatency(ctx context.Context, p *probe) Result {
	d, err := p.median(ctx, func(int) error { _, err := p.Files.Stat(p.file("first")); return err })
	return latency(d, err, slowStat, "a file's size and time")
}

// speed judges bytes in a time.
func speed(n int64, d time.Duration, err error) Result {
	if err != nil {
		return failure(localDisk, "%v", reason(err))
	}
	rate := float64(n) / max(d.Seconds(), 1e-9)
	text := size(int64(rate)) + "/s"
	if rate < slowBytes {
		return warning("use a faster disk, or copy shards to one", "%s, less than %s/s", text, size(slowBytes))
	}
	return ok("%s (%s)", text, size(n))
}

func checkWriteSpeed(ctx context.Context, p *probe) Result {
	piece := bytes.Repeat([]byte("mula"), 1<<18)
	start := p.Clock.Monotonic()
	f, err := p.Files.Create(p.file("large"))
	if err != nil {
		return speed(0, 0, err)
	}
	n := int64(0)
	for i := 0; err == nil && i < pieces && p.Clock.Monotonic()-start < slowPiece; i++ {
		if err = ctx.Err(); err == nil {
			_, err = f.Write(piece)
			n += int64(len(piece))
		}
	}
	err = errors.Join(err, f.Sync(), f.Close())
	return speed(n, p.Clock.Monotonic()-start, err)
}

func checkReadSpeed(_ context.Context, p *probe) Result {
	start := p.Clock.Monotonic()
	data, err := p.Files.Read(p.file("large"))
	return speed(int64(len(data)), p.Clock.Monotonic()-start, err)
}
