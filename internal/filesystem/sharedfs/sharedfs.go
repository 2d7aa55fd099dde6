// Package sharedfs has a file system for tests. It is in memory, and several hosts share it.
//
// A [Server] has the files. A [Host] is a machine that has mounted the file system, and an [FS] is
// the view of one process on a host. The model is:
//
//   - All hosts see written bytes and changed names at once.
//   - Bytes survive a crash of their host after Sync of the file, and names after SyncDir of the
//     directory. [Host.Crash] removes the rest, or a random part of the rest, as a disk does.
//     Names are lost in the reverse order in which they were changed.
//   - If Server.Stale is not 0, Stat and ReadDir of a path return its state of at most so long ago,
//     if the host has looked at it before, as NFS does. A path that the host has not found cannot
//     be opened for as long, until the host changes its directory. The host sees its own changes at
//     once. Opening a file that exists is never stale, and a host that fails to create a name
//     because it exists looks at it again.
//
// Before each operation, an FS calls a function of the test, which may wait or return an error.
package sharedfs

import (
	"io"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"mula/internal/filesystem"
	"mula/internal/filesystem/faultfs"
)

// A Server has the files. Its methods, and the methods of its hosts and their processes, are safe
// for concurrent use.
type Server struct {
	Stale time.Duration // age of the oldest attributes, and of the oldest knowledge that a name is missing

	mu      sync.Mutex
	root    *node
	changes []change // of names that are not on disk, the oldest first
	random  *rand.Rand
}

// A node is a file or a directory.
type node struct {
	directory bool
	mode      fs.FileMode
	entries   map[string]*node // of a directory
	data      []byte           // of a file
	synced    []byte           // data on disk, which may share memory with data
	least     int64            // the smallest size since Sync
	dirty     *Host            // the last host that wrote data that is not on disk; nil: all is on disk
	changed   time.Time
	locked    *file
}

// A change sets an entry of a directory.
type change struct {
	host     *Host
	in       *node
	name     string
	old, new *node // nil: no entry
	together bool  // with the change before it: both are parts of a rename
}

// A Host is a machine that has mounted the file system.
type Host struct {
	Name   string
	server *Server
	seen   map[string]sight
}

// A sight is the state of a path when a host looked at it.
type sight struct {
	at      time.Time
	info    fs.FileInfo
	entries []fs.DirEntry
	err     error
}

// Before is called before an operation of a process. If it returns an error, the operation is
// skipped and fails with that error. path is the new name for [faultfs.Rename].
type Before func(op faultfs.Op, path string) error

// New returns an empty file system. The seed determines what crashes leave.
func New(seed uint64) *Server {
	return &Server{root: newRoot(), random: rand.New(rand.NewPCG(seed, 0))}
}

func newRoot() *node {
	return &node{directory: true, entries: map[string]*node{}, mode: fs.ModeDir | 0o755}
}

// Clear loses all files.
func (s *Server) Clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.root, s.changes = newRoot(), nil
}

// Host adds a host.
func (s *Server) Host(name string) *Host {
	return &Host{Name: name, server: s, seen: map[string]sight{}}
}

// Process returns the file system as a process of the host sees it. before may be nil.
func (h *Host) Process(before Before) *FS { return &FS{host: h, before: before} }

// Crash loses what the host has not synced. Its open files stay usable, so the test ends its
// processes first.
func (h *Host) Crash() {
	s := h.server
	s.mu.Lock()
	defer s.mu.Unlock()
	own := 0
	for _, c := range s.changes {
		if c.host == h {
			own++
		}
	}
	lost := 0 // the number of newest changes that are lost
	if own > 0 && s.random.IntN(2) == 0 {
		lost = own
	} else if own > 0 {
		lost = s.random.IntN(own + 1)
	}
	var kept []change
	together := false // the next change to visit is part of a rename that is lost
	for _, c := range slices.Backward(s.changes) {
		switch {
		case c.host != h:
			kept = append(kept, c)
		case lost > 0 || together:
			lost--
			together = c.together
			if c.in.entries[c.name] == c.new { // else another change followed, which stays
				c.in.set(c.name, c.old)
			}
		}
	}
	slices.Reverse(kept)
	s.changes = kept
	s.root.visit(func(n *node) {
		if n.dirty == h {
			n.crash(s.random)
		}
	})
	h.seen = map[string]sight{}
}

// crash leaves the file's data on disk: the old data, the size of the new data with zeros, or a
// prefix of the new data. Synced bytes remain, unless the file has been shortened since then.
func (n *node) crash(random *rand.Rand) {
	now := n.data
	n.data = slices.Clone(n.synced)
	switch random.IntN(4) {
	case 0:
		if len(now) > len(n.data) {
			n.data = append(n.data, make([]byte, len(now)-len(n.data))...)
		}
	case 1:
		n.data = slices.Clone(now[:n.least+random.Int64N(int64(len(now))-n.least+1)])
	}
	n.sync()
}

// sync marks the file as being on disk.
func (n *node) sync() {
	n.synced, n.least, n.dirty = n.data[:len(n.data):len(n.data)], int64(len(n.data)), nil
}

// visit calls f for all nodes below n, in the order of their names.
func (n *node) visit(f func(*node)) {
	for _, name := range slices.Sorted(maps.Keys(n.entries)) {
		f(n.entries[name])
		n.entries[name].visit(f)
	}
}

// set sets an entry; nil removes it.
func (n *node) set(name string, to *node) {
	n.changed = time.Now()
	if to == nil {
		delete(n.entries, name)
	} else {
		n.entries[name] = to
	}
}

// An FS is the file system as one process sees it. It implements [filesystem.FS].
type FS struct {
	host   *Host
	before Before
}

// call begins an operation. Without an error it locks the server.
func (f *FS) call(op faultfs.Op, name string) error {
	if f.before != nil {
		if err := f.before(op, name); err != nil {
			return failed(op, name, err)
		}
	}
	f.host.server.mu.Lock()
	return nil
}

func failed(op faultfs.Op, name string, err error) error {
	return &fs.PathError{Op: string(op), Path: name, Err: err}
}

// find returns the node at a path, nil if it does not exist, and its directory, nil if that does
// not exist.
func (s *Server) find(name string) (dir, found *node) {
	found = s.root
	for part := range strings.SplitSeq(strings.Trim(filepath.ToSlash(filepath.Clean(name)), "/"), "/") {
		if part == "" || part == "." {
			continue
		}
		if found == nil || !found.directory {
			return nil, nil
		}
		dir, found = found, found.entries[part]
	}
	return dir, found
}

// change sets an entry for a host.
func (f *FS) change(in *node, name string, to *node, together bool) {
	s := f.host.server
	base := filepath.Base(name)
	s.changes = append(s.changes, change{f.host, in, base, in.entries[base], to, together})
	in.set(base, to)
	dir := filepath.Dir(filepath.Clean(name))
	delete(f.host.seen, filepath.Clean(name))
	delete(f.host.seen, dir)
	maps.DeleteFunc(f.host.seen, func(path string, seen sight) bool {
		return seen.err != nil && filepath.Dir(path) == dir
	})
}

// OpenFile implements [filesystem.FS].
func (f *FS) OpenFile(name string, flag int, perm fs.FileMode) (filesystem.File, error) {
	op := faultfs.Open
	if flag&os.O_CREATE != 0 {
		op = faultfs.Create
	}
	if err := f.call(op, name); err != nil {
		return nil, err
	}
	s := f.host.server
	defer s.mu.Unlock()
	dir, n := s.find(name)
	if flag&os.O_CREATE == 0 {
		seen, before := f.host.seen[filepath.Clean(name)]
		if n == nil || before && seen.err != nil {
			seen = f.see(name)
		}
		if seen.err != nil {
			return nil, failed(op, name, seen.err)
		}
	}
	switch {
	case n == nil && (dir == nil || flag&os.O_CREATE == 0):
		return nil, failed(op, name, fs.ErrNotExist)
	case n == nil:
		n = &node{mode: perm, changed: time.Now()}
		f.change(dir, name, n, false)
	case flag&os.O_EXCL != 0:
		return nil, f.exists(op, name)
	case n.directory && flag&(os.O_WRONLY|os.O_RDWR) != 0:
		return nil, failed(op, name, syscall.EISDIR)
	}
	opened := &file{fs: f, node: n, name: name, flag: flag}
	if flag&os.O_TRUNC != 0 {
		opened.resize(0)
	}
	return opened, nil
}

// Mkdir implements [filesystem.FS].
func (f *FS) Mkdir(name string, perm fs.FileMode) error {
	if err := f.call(faultfs.Create, name); err != nil {
		return err
	}
	s := f.host.server
	defer s.mu.Unlock()
	dir, n := s.find(name)
	if n != nil {
		return f.exists(faultfs.Create, name)
	}
	if dir == nil {
		return failed(faultfs.Create, name, fs.ErrNotExist)
	}
	f.change(dir, name, &node{directory: true, mode: fs.ModeDir | perm, entries: map[string]*node{},
		changed: time.Now()}, false)
	return nil
}

// Rename implements [filesystem.FS].
func (f *FS) Rename(from, to string) error {
	if err := f.call(faultfs.Rename, to); err != nil {
		return err
	}
	s := f.host.server
	defer s.mu.Unlock()
	source, n := s.find(from)
	target, old := s.find(to)
	switch {
	case n == nil || target == nil:
		return failed(faultfs.Rename, from, fs.ErrNotExist)
	case old != nil && old.directory && len(old.entries) > 0:
		return failed(faultfs.Rename, to, syscall.ENOTEMPTY)
	case old != nil && old.directory != n.directory:
		return failed(faultfs.Rename, to, fs.ErrExist)
	}
	f.change(source, from, nil, false)
	f.change(target, to, n, true)
	return nil
}

// exists returns the error of an operation that must create a name. The host has learned that the
// name exists.
func (f *FS) exists(op faultfs.Op, name string) error {
	delete(f.host.seen, filepath.Clean(name))
	return failed(op, name, fs.ErrExist)
}

// Link implements [filesystem.FS].
func (f *FS) Link(from, to string) error {
	if err := f.call(faultfs.Link, to); err != nil {
		return err
	}
	s := f.host.server
	defer s.mu.Unlock()
	_, n := s.find(from)
	target, old := s.find(to)
	switch {
	case n == nil || target == nil:
		return failed(faultfs.Link, from, fs.ErrNotExist)
	case n.directory:
		return failed(faultfs.Link, from, syscall.EPERM)
	case old != nil:
		return f.exists(faultfs.Link, to)
	}
	f.change(target, to, n, false)
	return nil
}

// Chtimes implements [filesystem.FS]. It ignores the time of access.
func (f *FS) Chtimes(name string, _, modified time.Time) error {
	if err := f.call(faultfs.Chtimes, name); err != nil {
		return err
	}
	s := f.host.server
	defer s.mu.Unlock()
	_, n := s.find(name)
	if n == nil {
		return failed(faultfs.Chtimes, name, fs.ErrNotExist)
	}
	n.changed = modified
	delete(f.host.seen, filepath.Clean(name))
	return nil
}

// Remove implements [filesystem.FS].
func (f *FS) Remove(name string) error {
	if err := f.call(faultfs.Remove, name); err != nil {
		return err
	}
	s := f.host.server
	defer s.mu.Unlock()
	dir, n := s.find(name)
	if n == nil {
		return failed(faultfs.Remove, name, fs.ErrNotExist)
	}
	if len(n.entries) > 0 || dir == nil {
		return failed(faultfs.Remove, name, syscall.ENOTEMPTY)
	}
	f.change(dir, name, nil, false)
	return nil
}

// Stat implements [filesystem.FS].
func (f *FS) Stat(name string) (fs.FileInfo, error) {
	if err := f.call(faultfs.Stat, name); err != nil {
		return nil, err
	}
	defer f.host.server.mu.Unlock()
	seen := f.see(name)
	if seen.err != nil {
		return nil, failed(faultfs.Stat, name, seen.err)
	}
	return seen.info, nil
}

// ReadDir implements [filesystem.FS].
func (f *FS) ReadDir(name string) ([]fs.DirEntry, error) {
	if err := f.call(faultfs.ReadDir, name); err != nil {
		return nil, err
	}
	defer f.host.server.mu.Unlock()
	seen := f.see(name)
	if seen.err == nil && !seen.info.IsDir() {
		seen.err = syscall.ENOTDIR
	}
	if seen.err != nil {
		return nil, failed(faultfs.ReadDir, name, seen.err)
	}
	return slices.Clone(seen.entries), nil
}

// see returns the state of a path, which may be stale.
func (f *FS) see(name string) sight {
	name = filepath.Clean(name)
	s, now := f.host.server, time.Now()
	if seen, ok := f.host.seen[name]; ok && now.Sub(seen.at) < s.Stale {
		return seen
	}
	seen := sight{at: now}
	if _, n := s.find(name); n == nil {
		seen.err = fs.ErrNotExist
	} else {
		seen.info = n.info(name)
		for _, entry := range slices.Sorted(maps.Keys(n.entries)) {
			seen.entries = append(seen.entries, fs.FileInfoToDirEntry(n.entries[entry].info(entry)))
		}
	}
	if s.Stale > 0 {
		f.host.seen[name] = seen
	}
	return seen
}

// SyncDir implements [filesystem.FS].
func (f *FS) SyncDir(name string) error {
	if err := f.call(faultfs.SyncDir, name); err != nil {
		return err
	}
	s := f.host.server
	defer s.mu.Unlock()
	_, n := s.find(name)
	if n == nil {
		return failed(faultfs.SyncDir, name, fs.ErrNotExist)
	}
	// A rename is on disk in both directories, or in none.
	var kept []change
	for i := 0; i < len(s.changes); {
		end := i + 1
		for end < len(s.changes) && s.changes[end].together {
			end++
		}
		if !slices.ContainsFunc(s.changes[i:end], func(c change) bool { return c.in == n }) {
			kept = append(kept, s.changes[i:end]...)
		}
		i = end
	}
	s.changes = kept
	return nil
}

// info describes a node.
func (n *node) info(name string) fs.FileInfo {
	return info{filepath.Base(name), int64(len(n.data)), n.mode, n.changed}
}

type info struct {
	name    string
	size    int64
	mode    fs.FileMode
	changed time.Time
}

func (i info) Name() string       { return i.name }
func (i info) Size() int64        { return i.size }
func (i info) Mode() fs.FileMode  { return i.mode }
func (i info) ModTime() time.Time { return i.changed }
func (i info) IsDir() bool        { return i.mode.IsDir() }
func (i info) Sys() any           { return nil }

// A file is an open file. It implements [filesystem.File].
type file struct {
	fs   *FS
	node *node
	name string
	flag int
	at   int64
}

func (f *file) Name() string { return f.name }

// Fd returns the number of no file.
func (f *file) Fd() uintptr { return ^uintptr(0) }

// TryLock locks the file until Close, and reports whether no other open file has locked it.
func (f *file) TryLock() bool {
	f.fs.host.server.mu.Lock()
	defer f.fs.host.server.mu.Unlock()
	if f.node.locked != nil {
		return false
	}
	f.node.locked = f
	return true
}

func (f *file) Close() error {
	f.fs.host.server.mu.Lock()
	defer f.fs.host.server.mu.Unlock()
	if f.node.locked == f {
		f.node.locked = nil
	}
	return nil
}

func (f *file) Read(p []byte) (int, error) {
	n, err := f.ReadAt(p, f.at)
	f.at += int64(n)
	if n > 0 {
		err = nil
	}
	return n, err
}

func (f *file) ReadAt(p []byte, at int64) (int, error) {
	if err := f.fs.call(faultfs.Read, f.name); err != nil {
		return 0, err
	}
	defer f.fs.host.server.mu.Unlock()
	if at >= int64(len(f.node.data)) {
		return 0, io.EOF
	}
	n := copy(p, f.node.data[at:])
	if n < len(p) {
		return n, io.EOF
	}
	return n, nil
}

func (f *file) Write(p []byte) (int, error) {
	if f.flag&os.O_APPEND != 0 {
		f.at = -1
	}
	n, at, err := f.write(p, f.at)
	f.at = at + int64(n)
	return n, err
}

func (f *file) WriteAt(p []byte, at int64) (int, error) {
	n, _, err := f.write(p, at)
	return n, err
}

// write writes at a position, -1 for the end of the file, and returns the position.
func (f *file) write(p []byte, at int64) (int, int64, error) {
	if err := f.fs.call(faultfs.Write, f.name); err != nil {
		return 0, max(at, 0), err
	}
	defer f.fs.host.server.mu.Unlock()
	if at < 0 {
		at = int64(len(f.node.data))
	}
	if at < int64(len(f.node.synced)) { // the bytes on disk stay
		f.node.data = slices.Clone(f.node.data)
	}
	f.resize(max(int64(len(f.node.data)), at+int64(len(p))))
	copy(f.node.data[at:], p)
	return len(p), at, nil
}

// resize changes the size of the file, and marks it as not synced.
func (f *file) resize(size int64) {
	n := f.node
	if before := int64(len(n.data)); size > before {
		n.data = slices.Grow(n.data, int(size-before))[:size]
		clear(n.data[before:])
	} else if size < before { // a later write must not change the bytes on disk
		n.data = n.data[:size:size]
	}
	n.least = min(n.least, size)
	n.dirty, n.changed = f.fs.host, time.Now()
	delete(f.fs.host.seen, filepath.Clean(f.name))
}

func (f *file) Seek(offset int64, whence int) (int64, error) {
	switch whence {
	case io.SeekCurrent:
		offset += f.at
	case io.SeekEnd:
		f.fs.host.server.mu.Lock()
		offset += int64(len(f.node.data))
		f.fs.host.server.mu.Unlock()
	}
	f.at = offset
	return offset, nil
}

func (f *file) Stat() (fs.FileInfo, error) {
	if err := f.fs.call(faultfs.Stat, f.name); err != nil {
		return nil, err
	}
	defer f.fs.host.server.mu.Unlock()
	return f.node.info(f.name), nil
}

func (f *file) Truncate(size int64) error {
	if err := f.fs.call(faultfs.Write, f.name); err != nil {
		return err
	}
	defer f.fs.host.server.mu.Unlock()
	f.resize(size)
	return nil
}

func (f *file) Sync() error {
	if err := f.fs.call(faultfs.Sync, f.name); err != nil {
		return err
	}
	defer f.fs.host.server.mu.Unlock()
	f.node.sync()
	return nil
}
