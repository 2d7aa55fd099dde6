package checkpoint

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io/fs"
	"maps"
	"net/url"
	"path/filepath"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/moe/safetensors"
	"mula/shards"
	"mula/train/collective"
	"mula/xpu/comm"
)

// Snapshots writes and finds the snapshots of a run. A snapshot has the weights and the state of a
// checkpoint, in folders of the hosts instead of a directory that all ranks share. Each rank writes
// its files into the folder of its host, and sends them to a rank of the next host, which writes
// them into the folder of that host. After the last host follows the first. So a snapshot outlives
// the loss of any one host. With a single host, each file exists once.
//
// The folder of each host also has the manifest of the snapshot, which is written last. A host that
// has the manifest has all its files. docs/formats/run.md describes the files.
//
// All ranks of a run call the methods that have a group.
type Snapshots struct {
	// Attempts have written the steps in the records of the run. Find ignores snapshots of others.
	// None: Find does not compare attempts.
	Attempts []SnapshotAttempt

	fsys    filesystem.FS
	dir     string // of this rank's host
	run     string // names the run
	attempt string // also part of the names of temporary directories; other processes have others
	hosts   []string
	first   bool  // this rank is the first of its host
	to      int   // the rank that copies the files of this rank; -1 for none
	from    []int // the ranks whose files this rank copies
	careful bool  // Find hashes files
}

// A SnapshotAttempt is one start of all ranks of a run, which may write snapshots. If the run
// resumes from an older state than a snapshot, it does the steps of the snapshot again and replaces
// their records. The snapshot may be on a host that the run does not use then. It must not be used
// later, because a failed machine may have written other records.
type SnapshotAttempt struct {
	Name  string `json:"name"`            // "" for snapshots of versions that wrote no names
	Until int64  `json:"until,omitempty"` // the largest step of a snapshot that may be used; 0: no limit
}

// Run returns the name of the run.
func (s *Snapshots) Run() string { return s.run }

// Attempt returns the name of the current attempt.
func (s *Snapshots) Attempt() string { return s.attempt }

// usable reports whether a snapshot of an attempt may be used.
func (s *Snapshots) usable(attempt string, step int64) bool {
	return len(s.Attempts) == 0 || slices.ContainsFunc(s.Attempts, func(a SnapshotAttempt) bool {
		return a.Name == attempt && (a.Until == 0 || step <= a.Until)
	})
}

// NewSnapshots returns the snapshots of a run for one rank. folder is a folder of the rank's host,
// run names the run, attempt names the processes of all ranks, and hosts has the host of each rank.
// A nil fsys is the file system of the machine.
func NewSnapshots(fsys filesystem.FS, folder, run, attempt string, hosts []string, rank int) *Snapshots {
	s := &Snapshots{fsys: filesystem.Default(fsys), run: run, attempt: attempt, hosts: hosts, to: -1,
		dir: filepath.Join(folder, "mula-snapshots-"+run, url.PathEscape(hosts[rank]))}
	var order []string // the hosts
	ranks := map[string][]int{}
	for r, host := range hosts {
		if ranks[host] == nil {
			order = append(order, host)
		}
		ranks[host] = append(ranks[host], r)
	}
	own := hosts[rank]
	s.first = ranks[own][0] == rank
	if len(order) == 1 {
		return s
	}
	at, number := slices.Index(order, own), slices.Index(ranks[own], rank)
	next, before := ranks[order[(at+1)%len(order)]], ranks[order[(at+len(order)-1)%len(order)]]
	s.to = next[number%len(next)]
	for i, r := range before {
		if i%len(ranks[own]) == number {
			s.from = append(s.from, r)
		}
	}
	return s
}

// snapshotName returns the name of the directory of a step's snapshot.
func snapshotName(step int64) string { return fmt.Sprintf("snapshot-%08d", step) }

// snapshotStep is the inverse of snapshotName.
func snapshotStep(name string) (int64, bool) {
	rest, ok := strings.CutPrefix(name, "snapshot-")
	if !ok {
		return 0, false
	}
	return stepOf("step-" + rest)
}

// A snapshotManifest is manifest.json of a snapshot. Every host has the same bytes.
type snapshotManifest struct {
	SHA256   string          `json:"sha256"` // of Snapshot
	Snapshot json.RawMessage `json:"snapshot"`
}

// snapshotContent is the member snapshot of the manifest.
type snapshotContent struct {
	Format     int                     `json:"format"`
	Run        string                  `json:"run"`
	Attempt    string                  `json:"attempt,omitempty"`
	Checkpoint int64                   `json:"checkpoint"` // step of the newest checkpoint then; -1 for none
	State      State                   `json:"state"`
	Files      map[string]snapshotFile `json:"files"`
	Model      *safetensors.Index      `json:"model"` // nil: there is one file of weights
	Optimizer  stateIndex              `json:"optimizer"`
}

// snapshotFormat is the format of the manifest.
const snapshotFormat = 1

type snapshotFile struct {
	shards.FileInfo
	Rank int `json:"rank"` // that wrote the file
}

// of returns the names of the files of a rank, in order.
func (c *snapshotContent) of(rank int) []string {
	var names []string
	for name, f := range c.Files {
		if f.Rank == rank {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// IsSnapshotName reports whether a name, of [Checkpoint.Name] or in a [Refused], is the name of a
// snapshot.
func IsSnapshotName(name string) bool {
	_, ok := snapshotStep(name)
	return ok
}

// Save writes a snapshot of state.Step, and removes older snapshots when this one is complete on
// all hosts. newest is the step of the newest checkpoint, -1 for none. It returns the bytes of the
// files of all ranks, without their copies. If a rank fails, all ranks return an error that names
// it, and the older snapshot stays.
func (s *Snapshots) Save(ctx context.Context, world *comm.Comm, state State, shard Shard, newest int64) (
	size int64, err error) {
	name := snapshotName(state.Step)
	defer func() {
		if err != nil {
			err = fmt.Errorf("writing %s: %w", name, err)
		}
	}()
	shard, err = shard.joined(ctx, true)
	if err != nil {
		return 0, err
	}
	c := &writer{Shard: shard, rank: world.Rank(), dir: s.dir, out: atomicfile.On(s.fsys), indexAlways: true,
		temp: filepath.Join(s.dir, "."+name+"."+s.attempt+atomicfile.TempSuffix), files: map[string]shards.FileInfo{}}
	defer func() {
		if s.first {
			filesystem.RemoveAll(s.fsys, c.temp) // no effect after the rename
		}
	}()
	if err := collective.Agree(ctx, world, filesystem.MkdirAll(s.fsys, c.temp, 0o700)); err != nil {
		return 0, err
	}
	if err := c.plan(ctx, world); err != nil {
		return 0, err
	}
	written, err := c.writeOwn(ctx)
	if err := collective.Agree(ctx, world, err); err != nil {
		return 0, err
	}
	text, err := s.describe(ctx, world, c, written, state, newest)
	if err != nil {
		return 0, err
	}
	content, err := decodeContent(text)
	if err := collective.Agree(ctx, world, err); err != nil {
		return 0, err
	}
	failed, lost := s.copyFiles(ctx, world, c, content)
	if lost != nil {
		return 0, lost
	}
	if s.first && failed == nil {
		failed = s.writeManifest(c, text)
	}
	if err := collective.Agree(ctx, world, failed); err != nil {
		return 0, err
	}
	if s.first {
		failed = publish(s.fsys, c.temp, filepath.Join(s.dir, name))
	}
	if err := collective.Agree(ctx, world, failed); err != nil {
		return 0, err
	}
	if s.first {
		failed = s.removeExcept(name)
	}
	for _, f := range content.Files {
		size += f.Bytes
	}
	return size, collective.Agree(ctx, world, failed)
}

// describe returns the content of the manifest on all ranks.
func (s *Snapshots) describe(ctx context.Context, world *comm.Comm, c *writer, written writtenFiles, state State,
	newest int64) (text json.RawMessage, err error) {
	_, err = collective.Decide(ctx, world, written, func(all []writtenFiles) ([]struct{}, error) {
		content := snapshotContent{Format: snapshotFormat, Run: s.run, Attempt: s.attempt, Checkpoint: newest,
			State: state, Files: map[string]snapshotFile{}, Model: c.model, Optimizer: *c.state}
		content.State.Format = format
		weights, err := c.combined(all)
		if err != nil {
			return nil, err
		}
		content.State.Weights = weights[0]
		for rank, w := range all {
			for name, info := range w.Files {
				content.Files[name] = snapshotFile{info, rank}
			}
		}
		text, err = json.Marshal(content)
		return make([]struct{}, len(all)), err
	})
	if err != nil {
		return nil, err
	}
	err = collective.Broadcast(ctx, world, &text)
	return text, err
}

// decodeContent reads the member snapshot of a manifest.
func decodeContent(text []byte) (*snapshotContent, error) {
	var version struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(text, &version); err != nil {
		return nil, err
	}
	if version.Format != snapshotFormat {
		return nil, fmt.Errorf("has format %d; this version reads %d", version.Format, snapshotFormat)
	}
	c := &snapshotContent{}
	if err := json.Unmarshal(text, c); err != nil {
		return nil, err
	}
	for name := range c.Files {
		if !isTensorFile(name) || name != filepath.Base(name) {
			return nil, fmt.Errorf("lists %q, which is not the name of a file of a snapshot", name)
		}
	}
	return c, nil
}

// writeManifest writes the manifest into the temporary directory.
func (s *Snapshots) writeManifest(c *writer, text json.RawMessage) error {
	data, err := json.Marshal(snapshotManifest{fmt.Sprintf("%x", sha256.Sum256(text)), text})
	if err != nil {
		return err
	}
	return c.writeBytes(manifestFile, data)
}

// copyChunk is the number of bytes that a rank sends to the next host at a time.
const copyChunk = 4 << 20

// copyFiles sends the files of this rank to the next host, and writes the copies of files of the
// previous host. A rank sends its files in pieces. It waits for each piece until the receiver has
// written it, so that no rank stores more than one piece of each sender. failed is an error of this
// rank. lost means that ranks cannot communicate.
func (s *Snapshots) copyFiles(ctx context.Context, world *comm.Comm, c *writer, content *snapshotContent) (
	failed, lost error) {
	var sent []filePiece
	if s.to >= 0 {
		sent = content.pieces(c.rank)
	}
	out := &pieceReader{fsys: s.fsys, dir: c.temp}
	defer out.close()
	var copies []*fileCopy
	for _, rank := range s.from {
		in := &fileCopy{out: c.out, dir: c.temp, rank: rank, content: content, pieces: content.pieces(rank)}
		defer in.close()
		copies = append(copies, in)
	}
	buffer, received, done := make([]byte, largestPiece(sent)), []byte(nil), make([]byte, 1)
	for _, in := range copies {
		received = slices.Grow(received, largestPiece(in.pieces))
	}
	for i, more := 0, true; more; i++ {
		more = false
		if i < len(sent) {
			more = true
			piece := buffer[:sent[i].bytes]
			if err := out.read(piece, sent[i]); err != nil && failed == nil {
				failed = err // the receiver still waits for the bytes
			}
			if err := comm.Send(ctx, world, s.to, piece); err != nil {
				return failed, err
			}
		}
		for _, in := range copies {
			if i >= len(in.pieces) {
				continue
			}
			more = true
			piece := received[:in.pieces[i].bytes]
			if err := comm.Recv(ctx, world, in.rank, piece); err != nil {
				return failed, err
			}
			if err := in.write(piece, in.pieces[i]); err != nil && failed == nil {
				failed = err
			}
			if err := comm.Send(ctx, world, in.rank, done); err != nil {
				return failed, err
			}
		}
		if i < len(sent) {
			if err := comm.Recv(ctx, world, s.to, done); err != nil {
				return failed, err
			}
		}
	}
	return failed, nil
}

// A filePiece is bytes of a file that a rank sends.
type filePiece struct {
	name  string
	begin int64
	bytes int
	last  bool // of the file
}

// pieces returns the pieces of the files of a rank, in order.
func (c *snapshotContent) pieces(rank int) (pieces []filePiece) {
	for _, name := range c.of(rank) {
		size := c.Files[name].Bytes
		for at := int64(0); at < size; at += copyChunk {
			n := min(copyChunk, size-at)
			pieces = append(pieces, filePiece{name, at, int(n), at+n == size})
		}
	}
	return pieces
}

// largestPiece returns the number of bytes of the largest piece.
func largestPiece(pieces []filePiece) (bytes int) {
	for _, p := range pieces {
		bytes = max(bytes, p.bytes)
	}
	return bytes
}

// A pieceReader reads pieces of files in order.
type pieceReader struct {
	fsys filesystem.FS
	dir  string
	file filesystem.File // open; nil for none
}

func (r *pieceReader) read(data []byte, p filePiece) (err error) {
	if p.begin == 0 {
		r.close()
		if r.file, err = filesystem.Open(r.fsys, filepath.Join(r.dir, p.name)); err != nil {
			r.file = nil
			return err
		}
	}
	if r.file == nil {
		return fmt.Errorf("%s was not opened", p.name)
	}
	n, err := r.file.ReadAt(data, p.begin)
	if n == len(data) {
		return nil
	}
	return fmt.Errorf("%s: reading byte %d: %w", filepath.Join(r.dir, p.name), p.begin, err)
}

func (r *pieceReader) close() {
	if r.file != nil {
		r.file.Close() // it was only read
		r.file = nil
	}
}

// A fileCopy writes copies of the files of a rank.
type fileCopy struct {
	out     atomicfile.Files
	dir     string
	rank    int
	content *snapshotContent
	pieces  []filePiece

	file   *atomicfile.File // being written; nil for none
	hash   hash.Hash
	failed bool
}

// write writes the next piece. After an error it does nothing.
func (c *fileCopy) write(data []byte, p filePiece) (err error) {
	if c.failed {
		return nil
	}
	defer func() { c.failed = err != nil }()
	path := filepath.Join(c.dir, p.name)
	if p.begin == 0 {
		if c.file, err = c.out.Create(path); err != nil {
			return err
		}
		c.hash = sha256.New()
	}
	if _, err := c.file.Write(data); err != nil {
		return err
	}
	c.hash.Write(data)
	if !p.last {
		return nil
	}
	if found := hex.EncodeToString(c.hash.Sum(nil)); found != c.content.Files[p.name].SHA256 {
		return fmt.Errorf("the copy of %s has SHA-256 %s, but rank %d wrote %s: memory of a host or the network is at "+
			"fault", path, found, c.rank, c.content.Files[p.name].SHA256)
	}
	defer c.close()
	return c.file.Rename()
}

func (c *fileCopy) close() {
	if c.file != nil {
		c.file.Abort() // no effect after the rename
		c.file = nil
	}
}

// removeExcept removes everything from the folder of this rank's host except the entry of a name.
func (s *Snapshots) removeExcept(name string) error {
	entries, err := s.fsys.ReadDir(s.dir)
	var errs []error
	for _, e := range entries {
		if e.Name() != name {
			errs = append(errs, s.discard(e.Name()))
		}
	}
	return errors.Join(append(errs, err)...)
}

// discard removes an entry of the folder. A snapshot that is partly removed has no snapshot's name.
func (s *Snapshots) discard(name string) error {
	path := filepath.Join(s.dir, name)
	if _, ok := snapshotStep(name); ok {
		return Discard(s.fsys, path)
	}
	return filesystem.RemoveAll(s.fsys, path)
}

// RemoveUntil removes the snapshots of at most step steps from the folder of this rank's host.
func (s *Snapshots) RemoveUntil(step int64) error {
	if !s.first {
		return nil
	}
	entries, err := s.fsys.ReadDir(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		if at, ok := snapshotStep(e.Name()); ok && at <= step {
			errs = append(errs, s.discard(e.Name()))
		}
	}
	return errors.Join(errs...)
}

// RemoveTemporary removes what killed processes were writing or removing in the folder of this
// rank's host.
func (s *Snapshots) RemoveTemporary() error {
	if !s.first {
		return nil
	}
	return RemoveTemporary(s.fsys, s.dir)
}

// Remove removes all snapshots of the run from the folder of this rank's host, and the folder.
func (s *Snapshots) Remove() error {
	if !s.first {
		return nil
	}
	err := filesystem.RemoveAll(s.fsys, s.dir)
	s.fsys.Remove(filepath.Dir(s.dir)) // fails if another host has its folder there, which then removes it
	return err
}

// HashFiles makes [Snapshots.Find] compare the hashes of all files from now on, so that it uses
// intact copies of damaged files. It reports whether Find has not done this before. All ranks call
// it after [Shard.Load] has found damage.
func (s *Snapshots) HashFiles() bool {
	before := s.careful
	s.careful = true
	return !before
}

// A hostedSnapshot is a snapshot in the folder of a host.
type hostedSnapshot struct {
	Step    int64    `json:"step"`
	SHA256  string   `json:"sha256"`            // of the content
	Files   []string `json:"files"`             // that the host has, of the right sizes
	Count   int      `json:"count"`             // of the files of the snapshot on all hosts
	Damaged []string `json:"damaged,omitempty"` // what is wrong with other files
	Error   string   `json:"error,omitempty"`   // the snapshot cannot be read
}

// A foundSnapshot is the snapshot that the ranks use.
type foundSnapshot struct {
	Step    int64          `json:"step"`    // -1 for none
	SHA256  string         `json:"sha256"`  // of the content
	Root    int            `json:"root"`    // a rank that has the manifest
	Readers map[string]int `json:"readers"` // the rank that reads each file
	Refused []Refused      `json:"refused"` // newer ones
}

// Find returns the newest complete snapshot of at most until steps that is newer than the
// checkpoint saved, which may be nil. It returns nil if there is none. It does not use refused
// snapshots, and no snapshots of a time when the run had a newer checkpoint than all checkpoints
// now, damaged ones included: the user has moved that checkpoint away. It also returns newer
// snapshots that cannot be used. [Shard.Load] verifies the files, and after [Snapshots.HashFiles]
// Find does, too.
func (s *Snapshots) Find(ctx context.Context, world *comm.Comm, saved *Checkpoint, refused []Refused, until int64) (
	*Checkpoint, []Refused, error) {
	newest := int64(-1)
	if saved != nil {
		newest = saved.State.Step
	}
	known := newest
	for _, r := range refused {
		if step, ok := stepOf(r.Checkpoint); ok {
			known = max(known, step)
		}
	}
	var own []hostedSnapshot
	if s.first {
		own = s.list(ctx, func(step int64) bool {
			return step > newest && step <= until && !slices.ContainsFunc(refused, func(r Refused) bool {
				return r.Checkpoint == snapshotName(step)
			})
		}, known)
	}
	var found foundSnapshot
	_, err := collective.Decide(ctx, world, own, func(all [][]hostedSnapshot) ([]struct{}, error) {
		found = s.choose(all)
		return make([]struct{}, len(all)), nil
	})
	if err != nil {
		return nil, nil, err
	}
	if err := collective.Broadcast(ctx, world, &found); err != nil {
		return nil, nil, err
	}
	if found.Step < 0 {
		return nil, found.Refused, nil
	}
	content, err := s.fetch(ctx, world, found)
	if err != nil {
		return nil, nil, err
	}
	c := &Checkpoint{Dir: filepath.Join(s.dir, snapshotName(found.Step)), State: content.State, fsys: s.fsys,
		manifest: manifest{format, found.Step, map[string]shards.FileInfo{}},
		snapshot: &snapshotSource{indexes{content.Model, &content.Optimizer}, found.Readers}}
	for name, f := range content.Files {
		c.manifest.Files[name] = f.FileInfo
	}
	return c, found.Refused, nil
}

// list returns the snapshots of the run in the folder of this rank's host whose steps are wanted.
// known is the step of the newest checkpoint.
func (s *Snapshots) list(ctx context.Context, wanted func(step int64) bool, known int64) (list []hostedSnapshot) {
	entries, err := s.fsys.ReadDir(s.dir)
	if err != nil {
		return nil // a spare host has none
	}
	for _, e := range entries {
		step, ok := snapshotStep(e.Name())
		if !ok || !wanted(step) {
			continue
		}
		dir := filepath.Join(s.dir, e.Name())
		text, err := s.readManifest(dir)
		var content *snapshotContent
		if err == nil {
			content, err = decodeContent(text)
		}
		switch {
		case err != nil:
			err = fmt.Errorf("%s: %w", filepath.Join(dir, manifestFile), err)
			list = append(list, hostedSnapshot{Step: step, Error: err.Error()})
			continue
		case content.Run != s.run || content.State.Step != step || content.Checkpoint > known,
			!s.usable(content.Attempt, step):
			continue
		}
		h := hostedSnapshot{Step: step, SHA256: fmt.Sprintf("%x", sha256.Sum256(text)), Count: len(content.Files)}
		for _, name := range slices.Sorted(maps.Keys(content.Files)) {
			info, err := s.fsys.Stat(filepath.Join(dir, name))
			if err == nil && info.Size() == content.Files[name].Bytes {
				h.Files = append(h.Files, name)
			}
		}
		if s.careful {
			s.dropDamaged(ctx, dir, content, &h)
		}
		list = append(list, h)
	}
	return list
}

// dropDamaged removes the files whose bytes do not have their hashes from the files of a snapshot
// in dir.
func (s *Snapshots) dropDamaged(ctx context.Context, dir string, content *snapshotContent, h *hostedSnapshot) {
	errs := make([]error, len(h.Files))
	var group errgroup.Group
	group.SetLimit(runtime.GOMAXPROCS(0))
	for i, name := range h.Files {
		group.Go(func() error {
			f, err := hashFile(ctx, s.fsys, filepath.Join(dir, name), content.Files[name].FileInfo)
			if err == nil {
				err = f.compare()
			}
			errs[i] = err
			return nil
		})
	}
	_ = group.Wait() // the functions return nil
	var intact []string
	for i, name := range h.Files {
		if errs[i] == nil {
			intact = append(intact, name)
		} else {
			h.Damaged = append(h.Damaged, errs[i].Error())
		}
	}
	h.Files = intact
}

// readManifest returns the content in the manifest of a snapshot.
func (s *Snapshots) readManifest(dir string) ([]byte, error) {
	text, err := readSmall(s.fsys, filepath.Join(dir, manifestFile))
	if err != nil {
		return nil, err
	}
	var m snapshotManifest
	if err := json.Unmarshal(text, &m); err != nil {
		return nil, err
	}
	if found := fmt.Sprintf("%x", sha256.Sum256(m.Snapshot)); found != m.SHA256 {
		return nil, fmt.Errorf("its content has SHA-256 %s, but it says %s", found, m.SHA256)
	}
	return m.Snapshot, nil
}

// choose returns the newest snapshot whose files are on the hosts. all has the snapshots of the
// first rank of each host, and none of other ranks.
func (s *Snapshots) choose(all [][]hostedSnapshot) foundSnapshot {
	found := foundSnapshot{Step: -1, Readers: map[string]int{}}
	type identity struct {
		step   int64
		sha256 string
	}
	counts := map[identity]int{}
	problems := map[int64][]string{} // of steps
	for rank, list := range all {
		for _, h := range list {
			if h.Error != "" {
				problems[h.Step] = append(problems[h.Step], fmt.Sprintf("host %s: %s", s.hosts[rank], h.Error))
				continue
			}
			for _, damaged := range h.Damaged {
				problems[h.Step] = append(problems[h.Step], fmt.Sprintf("host %s: %s", s.hosts[rank], damaged))
			}
			counts[identity{h.Step, h.SHA256}] = h.Count
		}
	}
	order := slices.SortedFunc(maps.Keys(counts), func(a, b identity) int {
		return cmp.Or(cmp.Compare(b.step, a.step), strings.Compare(a.sha256, b.sha256))
	})
	for _, id := range order {
		holders := map[string][]int{} // the first ranks of the hosts that have each file
		root := -1
		for rank, list := range all {
			for _, h := range list {
				if h.Error == "" && h.Step == id.step && h.SHA256 == id.sha256 {
					if root < 0 {
						root = rank
					}
					for _, name := range h.Files {
						holders[name] = append(holders[name], rank)
					}
				}
			}
		}
		if len(holders) == counts[id] {
			found.Step, found.SHA256, found.Root = id.step, id.sha256, root
			found.Readers = s.readers(holders)
			break
		}
		problems[id.step] = append(problems[id.step], fmt.Sprintf("%d of its %d files are on none of the hosts",
			counts[id]-len(holders), counts[id]))
	}
	for _, step := range slices.Backward(slices.Sorted(maps.Keys(problems))) {
		if step > found.Step {
			found.Refused = append(found.Refused, Refused{snapshotName(step), strings.Join(problems[step], "; ")})
		}
	}
	return found
}

// readers returns the rank that reads each file: of the ranks of the hosts that have the file, the
// rank with the fewest files. holders has the first ranks of these hosts.
func (s *Snapshots) readers(holders map[string][]int) map[string]int {
	ranks := map[string][]int{}
	for rank, host := range s.hosts {
		ranks[host] = append(ranks[host], rank)
	}
	files := make([]int, len(s.hosts))
	readers := map[string]int{}
	for _, name := range slices.Sorted(maps.Keys(holders)) {
		reader := -1
		for _, first := range holders[name] {
			for _, rank := range ranks[s.hosts[first]] {
				if reader < 0 || files[rank] < files[reader] {
					reader = rank
				}
			}
		}
		readers[name] = reader
		files[reader]++
	}
	return readers
}

// fetch returns the content of a snapshot on all ranks.
func (s *Snapshots) fetch(ctx context.Context, world *comm.Comm, found foundSnapshot) (*snapshotContent, error) {
	var text []byte
	var err error
	if world.Rank() == found.Root {
		text, err = s.readManifest(filepath.Join(s.dir, snapshotName(found.Step)))
	}
	if err := collective.Agree(ctx, world, err); err != nil {
		return nil, err
	}
	if world.Size() > 1 {
		length := []int64{int64(len(text))}
		if err := comm.Broadcast(ctx, world, found.Root, length); err != nil {
			return nil, err
		}
		if world.Rank() != found.Root {
			text = make([]byte, length[0])
		}
		if err := comm.Broadcast(ctx, world, found.Root, text); err != nil {
			return nil, err
		}
	}
	content, err := decodeContent(bytes.Clone(text))
	return content, collective.Agree(ctx, world, err)
}

// A snapshotSource has what loading a snapshot needs in addition to the fields of [Checkpoint].
type snapshotSource struct {
	index   indexes
	readers map[string]int // the rank that reads each file
}

// IsSnapshot reports whether c is a snapshot instead of a checkpoint.
func (c *Checkpoint) IsSnapshot() bool { return c.snapshot != nil }
