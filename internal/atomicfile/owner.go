package atomicfile

import (
	"encoding/hex"
	"errors"
	"fmt"
	"hash/fnv"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"
)

// An Owner identifies a process, so that other processes, also on other machines, can decide
// whether it may still write.
type Owner struct {
	Host    string `json:"host"`    // the name of the machine, for messages
	Machine string `json:"machine"` // 16 hexadecimal digits; process ids are comparable if Machine is equal
	PID     int    `json:"pid"`
	Started int64  `json:"started"` // start time of the process in the system's unit; 0 if not known
}

// Self returns the owner for this process.
func Self() Owner { return self() }

var self = sync.OnceValue(func() Owner {
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	started, _ := processStart(os.Getpid())
	return Owner{Host: host, Machine: machine(host, realm()), PID: os.Getpid(), Started: started}
})

// machine returns Owner.Machine. 64 bits are enough to avoid collisions among the machines, boots
// and containers of a cluster.
func machine(host, realm string) string {
	h := fnv.New64a()
	fmt.Fprintf(h, "%s\n%s", host, realm)
	return hex.EncodeToString(h.Sum(nil))
}

// Gone reports whether the process has certainly ended. If Gone returns false, the process may run,
// or belong to another machine or container.
func (o Owner) Gone() bool {
	self := Self()
	if o.Machine != self.Machine || o.PID <= 0 {
		return false
	}
	if o.PID == self.PID {
		return o.Started != self.Started
	}
	started, alive := processStart(o.PID)
	return !alive || o.Started != 0 && started != 0 && o.Started != started
}

func (o Owner) String() string { return fmt.Sprintf("process %d on %s", o.PID, o.Host) }

// machineDigits is the length of Owner.Machine.
const machineDigits = 16

// maxTempBase is the number of bytes of the final name that a temporary name repeats. It keeps
// temporary names below the limit of 255 bytes of common file systems.
const maxTempBase = 150

// TempName returns a new unique temporary name in the directory of path. The name identifies the
// process that created it, for [Clean]:
//
//	.<name>.<machine>-<pid>-<started>-<random>.tmp
func TempName(path string) string {
	base := filepath.Base(path)
	if len(base) > maxTempBase {
		base = strings.ToValidUTF8(base[:maxTempBase], "")
	}
	self := Self()
	return filepath.Join(filepath.Dir(path), fmt.Sprintf(".%s.%s-%d-%s-%s%s", base, self.Machine, self.PID,
		strconv.FormatInt(self.Started, 36), strconv.FormatUint(uint64(rand.Uint32()), 36), TempSuffix))
}

// Temporary parses the path of a temporary file. It returns the path without the parts that
// [TempName] added, which is the final path unless TempName shortened it, and whether this process
// created the file. ok is false for other paths.
func Temporary(path string) (final string, own, ok bool) {
	name := filepath.Base(path)
	owner, ok := tempOwner(name)
	if !ok {
		return path, false, false
	}
	name = strings.TrimSuffix(name[1:], TempSuffix)
	return filepath.Join(filepath.Dir(path), name[:strings.LastIndexByte(name, '.')]),
		owner.Machine == Self().Machine && owner.PID == Self().PID && owner.Started == Self().Started, true
}

// tempOwner parses the owner from a temporary name. ok is false for names that [TempName] did not
// make.
func tempOwner(name string) (o Owner, ok bool) {
	name, ok = strings.CutPrefix(name, ".")
	if !ok {
		return o, false
	}
	if name, ok = strings.CutSuffix(name, TempSuffix); !ok {
		return o, false
	}
	parts := strings.Split(name[strings.LastIndexByte(name, '.')+1:], "-")
	if len(parts) != 4 || len(parts[0]) != machineDigits {
		return o, false
	}
	if _, err := hex.DecodeString(parts[0]); err != nil {
		return o, false
	}
	pid, err := strconv.Atoi(parts[1])
	if err != nil || pid <= 0 {
		return o, false
	}
	started, err := strconv.ParseInt(parts[2], 36, 64)
	if err != nil || started < 0 {
		return o, false
	}
	if _, err := strconv.ParseUint(parts[3], 36, 32); err != nil {
		return o, false
	}
	return Owner{Machine: parts[0], PID: pid, Started: started}, true
}

// AbandonedAfter is the age at which [Clean] removes a temporary file of a process that it cannot
// look up, such as a process on another machine. The modification time of a file that is being
// written is always more recent.
const AbandonedAfter = 24 * time.Hour

// Clean removes abandoned temporary files in dir and returns how many it removed. A file is
// abandoned if its process ran on this machine and has ended. If the state of the process is
// unknown, the file is abandoned after [AbandonedAfter] without a modification. Files that the user
// may not remove stay.
func Clean(dir string) (int, error) { return Files{}.Clean(dir) }

// Clean is [Clean] on the file system.
func (w Files) Clean(dir string) (int, error) {
	entries, err := w.FS().ReadDir(dir)
	if err != nil {
		return 0, fmt.Errorf("cleaning up: %w", err)
	}
	self, removed := Self(), 0
	for _, entry := range entries {
		owner, ok := tempOwner(entry.Name())
		if !ok {
			continue
		}
		path := filepath.Join(dir, entry.Name())
		info, err := entry.Info()
		if err != nil || !info.Mode().IsRegular() {
			continue // owned by another user, or removed meanwhile
		}
		if !owner.Gone() && (owner.Machine == self.Machine || time.Since(info.ModTime()) < AbandonedAfter) {
			continue
		}
		err = Injected(OpRemove, path)
		if err == nil {
			err = w.FS().Remove(path)
		}
		switch {
		case err == nil:
			removed++
		case !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, fs.ErrPermission):
			return removed, fmt.Errorf("cleaning up: %w", err)
		}
	}
	return removed, nil
}
