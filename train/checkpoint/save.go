package checkpoint

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/shards"
	"mula/train/collective"
	"mula/xpu"
	"mula/xpu/comm"
)

// optimizerShardName is the name of file k of n, from 1, of the optimizer's state.
func optimizerShardName(k, n int) string {
	if n == 1 {
		return optimizerFile
	}
	return fmt.Sprintf("optimizer-%05d-of-%05d.safetensors", k, n)
}

// modelShardName is the name of file k of n, from 1, of the weights.
func modelShardName(k, n int) string {
	if n == 1 {
		return modelFile
	}
	return safetensors.ShardName(k, n)
}

// Options are settings of [Save] and [Start]. All ranks have the same Writers.
type Options struct {
	Tokenizer []byte        // content of tokenizer.json, which rank 0 writes; nil for none
	Writers   int           // ranks that write at the same time at most; 0: all ranks
	FS        filesystem.FS // on which the checkpoint is written; nil: the machine's
}

// waves returns the number of turns in which n ranks write.
func (o Options) waves(n int) int {
	if o.Writers == 0 {
		return 1
	}
	return (n + o.Writers - 1) / o.Writers
}

// Save writes a checkpoint of state.Step into dir. Every rank of world writes its weights and its
// part of the optimizer's state. Rank 0 also writes the state and the configuration. All files are
// in a temporary directory, which rank 0 creates. Rank 0 writes the manifest after every rank has
// synced its files, and then renames the directory, so a directory with the name of a checkpoint is
// complete. An existing directory of that name is a refused checkpoint, and is replaced. Save sets
// state.Format and state.Weights. If a rank fails, all ranks return an error that names it, and
// older checkpoints do not change.
func Save(ctx context.Context, world *comm.Comm, dir string, state *State, s Shard, o Options) (err error) {
	p, err := Start(ctx, world, dir, *state, s, o, nil)
	if err != nil {
		return err
	}
	defer p.Close()
	for finished := false; err == nil && !finished; {
		finished, err = p.Advance(ctx, world)
	}
	if err == nil {
		*state = p.State
	}
	return err
}

// A Pending is a checkpoint that this rank writes in the background. Close ends it.
type Pending struct {
	State State // of the checkpoint; Weights is set when the checkpoint is finished

	writer  writer
	options Options
	wave    int // ranks of this wave write; see [Pending.startWave]
	written writtenFiles
	wrote   bool // all ranks have written their files; rank 0 publishes them

	cancel context.CancelFunc
	done   chan struct{} // closed when the work in the background has ended, with err
	err    error
}

// Start begins [Save] in the background. It copies the weights and the state into *memory, which it
// enlarges if needed. The caller calls [Pending.Advance] until the checkpoint is finished, and does
// not use the memory before that. If memory is nil, nothing is copied, and the caller does not
// change the weights and the state before that.
func Start(ctx context.Context, world *comm.Comm, dir string, state State, s Shard, o Options,
	memory *[]float32) (*Pending, error) {
	p := &Pending{State: state, options: o, cancel: func() {}}
	name, c := Name(state.Step), &p.writer
	s, err := s.joined(ctx, true)
	if err != nil {
		return nil, p.named(err)
	}
	*c = writer{Shard: s, rank: world.Rank(), dir: dir, out: atomicfile.On(o.FS), files: map[string]shards.FileInfo{}}
	if c.rank == 0 {
		c.temp = filepath.Join(dir, "."+name+atomicfile.TempSuffix)
		if world.Size() > 1 {
			// a new name, because a rank may still write to the directory of an earlier attempt
			c.temp = atomicfile.TempName(filepath.Join(dir, name))
		}
		err = c.begin()
	}
	if err = c.meet(ctx, world, err); err == nil {
		err = c.plan(ctx, world)
	}
	if err == nil && memory != nil {
		err = collective.Agree(ctx, world, p.snapshot(ctx, memory))
	}
	if err != nil {
		p.Close()
		return nil, p.named(err)
	}
	p.startWave(ctx, world)
	return p, nil
}

// snapshot copies all values that this rank writes, so that they can change.
func (p *Pending) snapshot(ctx context.Context, memory *[]float32) error {
	text, err := json.Marshal(p.State)
	if err != nil {
		return err
	}
	p.State = State{}
	if err := json.Unmarshal(text, &p.State); err != nil {
		return err
	}
	return p.writer.copyTo(ctx, memory)
}

// named adds the name of the checkpoint to an error.
func (p *Pending) named(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("saving checkpoint %s: %w", Name(p.State.Step), err)
}

// start runs f in the background.
func (p *Pending) start(ctx context.Context, f func(ctx context.Context) error) {
	done := make(chan struct{})
	ctx, p.cancel = context.WithCancel(ctx)
	p.done = done
	go func() {
		defer close(done)
		p.err = f(ctx)
	}()
}

// startWave starts the ranks of the current wave, which write their files. Of n waves, rank r is in
// wave r mod n, so that the writers of a wave are on many hosts.
func (p *Pending) startWave(ctx context.Context, world *comm.Comm) {
	writes := p.writer.rank%p.options.waves(world.Size()) == p.wave
	p.start(ctx, func(ctx context.Context) (err error) {
		if !writes {
			return nil
		}
		if p.written, err = p.writer.writeOwn(ctx); err == nil && p.writer.rank == 0 {
			err = p.writer.writeOthers(p.options.Tokenizer)
		}
		return err
	})
}

// Done reports whether this rank does not write at the moment. When all ranks are done, they call
// Advance.
func (p *Pending) Done() bool {
	select {
	case <-p.done:
		return true
	default:
		return false
	}
}

// Advance waits until this rank is done, exchanges the results of all ranks, and begins the next
// part of the work: the files of the next wave of ranks. After the files of all ranks, rank 0
// writes the manifest and publishes the checkpoint. It reports whether the checkpoint is complete.
// All ranks call it, also after an error of their own.
func (p *Pending) Advance(ctx context.Context, world *comm.Comm) (finished bool, err error) {
	<-p.done
	p.cancel()
	if p.wrote {
		return true, p.named(collective.Agree(ctx, world, p.err))
	}
	if p.wave+1 < p.options.waves(world.Size()) {
		if err := collective.Agree(ctx, world, p.err); err != nil {
			return false, p.named(err)
		}
		p.wave++
		p.startWave(ctx, world)
		return false, nil
	}
	if err := collective.Agree(ctx, world, p.err); err != nil {
		return false, p.named(err)
	}
	var all []writtenFiles // of each rank, on rank 0
	p.State.Format = format
	p.State.Weights, err = collective.Decide(ctx, world, p.written, func(written []writtenFiles) ([]string, error) {
		all = written
		return p.writer.combined(written)
	})
	if err != nil {
		return false, p.named(err)
	}
	p.wrote = true
	p.start(ctx, func(context.Context) error {
		if p.writer.rank != 0 {
			return nil
		}
		return p.writer.finish(Name(p.State.Step), all, p.State)
	})
	return false, nil
}

// Close ends the work of this rank and removes the temporary directory. A finished checkpoint
// stays.
func (p *Pending) Close() {
	p.cancel()
	if p.done != nil {
		<-p.done
	}
	if p.writer.rank == 0 {
		filesystem.RemoveAll(p.writer.out.FS(), p.writer.temp) // no effect after the rename
	}
}

// A writer writes a checkpoint for one rank.
type writer struct {
	Shard
	rank      int
	dir, temp string
	out       atomicfile.Files // writes the files

	indexAlways bool // the state has an index also if one rank writes the state; for snapshots

	weights []safetensors.Tensor       // tensors that this rank writes
	content []heldTensor               // values of weights
	ranges  []tensorRange              // ranges of the optimizer's state that this rank writes
	values  []xpu.Tensor               // values of ranges
	names   [2]string                  // names of its files of weights and state, "" for no file
	indexed bool                       // several ranks write the state
	model   *safetensors.Index         // over all ranks, on rank 0; nil for a single file
	state   *stateIndex                // likewise
	files   map[string]shards.FileInfo // written by this rank
}

// writtenFiles is the message of a rank that has written its files.
type writtenFiles struct {
	Files  map[string]shards.FileInfo `json:"files"`
	Hashes []tensorHash               `json:"hashes"`
}

// begin creates the temporary directory.
func (c *writer) begin() error {
	fsys := c.out.FS()
	if err := filesystem.MkdirAll(fsys, c.dir, 0o755); err != nil {
		return err
	}
	if err := filesystem.RemoveAll(fsys, c.temp); err != nil {
		return err
	}
	if err := atomicfile.Injected(atomicfile.OpCreate, c.temp); err != nil {
		return err
	}
	return fsys.Mkdir(c.temp, 0o755)
}

// copyTo copies the values that this rank writes to memory, and writes from there.
func (c *writer) copyTo(ctx context.Context, memory *[]float32) error {
	var tensors []*xpu.Tensor
	elements := 0
	for i := range c.content {
		tensors = append(tensors, &c.content[i].weight)
	}
	for i := range c.values {
		tensors = append(tensors, &c.values[i])
	}
	for _, t := range tensors {
		elements += t.Elements()
	}
	if len(*memory) < elements {
		*memory = make([]float32, elements)
	}
	rest := *memory
	for _, t := range tensors {
		n := t.Elements()
		if err := c.device.Read(ctx, rest[:n], *t); err != nil {
			return err
		}
		*t, rest = xpu.Of(rest[:n], n), rest[n:]
	}
	c.device = hostMemory{}
	return nil
}

// hostMemory has only tensors of host memory, which no command of a device changes.
type hostMemory struct{ xpu.Memory }

func (hostMemory) Wait(ctx context.Context) error { return ctx.Err() }

// meet sends the name of rank 0's directory, or its error, to all ranks.
func (c *writer) meet(ctx context.Context, world *comm.Comm, own error) error {
	if err := collective.Agree(ctx, world, own); err != nil {
		return err
	}
	name := filepath.Base(c.temp)
	err := collective.Broadcast(ctx, world, &name)
	c.temp = filepath.Join(c.dir, name)
	return err
}

// A contribution describes the part of a checkpoint that a rank has, for the plan of rank 0.
type contribution struct {
	Runs     []indexRun        `json:"runs"`   // tensors whose weights the rank has
	Ranges   [][4]int          `json:"ranges"` // of the state that the rank writes, as tensorRange
	Metadata map[string]string `json:"metadata"`
}

// An assignment has the part of a checkpoint that a rank writes.
type assignment struct {
	Weights []indexRun `json:"weights"` // tensors
	Names   [2]string  `json:"names"`   // see writer.names
	Index   bool       `json:"index"`   // the state has an index, with the metadata
}

// plan asks rank 0 what this rank writes, and into which files.
func (c *writer) plan(ctx context.Context, world *comm.Comm) error {
	var err error
	if c.ranges, c.values, err = c.written(); err == nil {
		if _, missing := c.out.FS().Stat(c.temp); missing != nil {
			err = fmt.Errorf("cannot see %s, which rank 0 has created: %w; %s", c.temp, missing, needShared)
		}
	}
	if err := collective.Agree(ctx, world, err); err != nil {
		return err
	}
	own := contribution{Runs: c.runs(), Metadata: c.metadata}
	for _, r := range c.ranges {
		own.Ranges = append(own.Ranges, [4]int{r.tensor, r.state, r.begin, r.end})
	}
	a, err := collective.Decide(ctx, world, own, c.decide)
	if err != nil {
		return err
	}
	c.names, c.indexed = a.Names, a.Index
	for _, h := range c.held {
		if contains(a.Weights, h.index) {
			c.weights, c.content = append(c.weights, c.tensors[h.index]), append(c.content, h)
		}
	}
	return nil
}

// decide returns on rank 0 what each rank writes, and sets the indexes.
func (c *writer) decide(all []contribution) ([]assignment, error) {
	result, runs := make([]assignment, len(all)), make([][]indexRun, len(all))
	for r, other := range all {
		runs[r] = other.Runs
		if !maps.Equal(other.Metadata, all[0].Metadata) {
			return nil, fmt.Errorf("the optimizer's scalars are %v on rank 0, but %v on rank %d; resume "+
				"from an older checkpoint", all[0].Metadata, other.Metadata, r)
		}
	}

	// The weights: whole tensors, each once.
	owner, err := assign(c.tensors, runs)
	if err != nil {
		return nil, err
	}
	for r, own := range ownedRuns(owner, len(all)) {
		result[r].Weights = own
	}
	writers := make([]bool, len(all))
	for _, r := range owner {
		writers[r] = true
	}
	names, several := fileNames(writers, modelShardName)
	if several {
		size := int64(0)
		c.model = &safetensors.Index{Metadata: map[string]any{}, WeightMap: map[string]string{}}
		for i, t := range c.tensors {
			c.model.WeightMap[t.Name] = names[owner[i]]
			size += t.Elements() * int64(t.DType.Size())
		}
		c.model.Metadata["total_size"] = size
	}
	for r, name := range names {
		result[r].Names[0] = name
	}

	// The optimizer's state.
	for r, other := range all {
		writers[r] = len(other.Ranges) > 0
	}
	names, several = fileNames(writers, optimizerShardName)
	var ranges []placedRange
	for r, other := range all {
		for _, x := range other.Ranges {
			ranges = append(ranges, placedRange{tensorRange{x[0], x[1], x[2], x[3]}, names[r]})
		}
	}
	if err := c.check(ranges); err != nil {
		return nil, fmt.Errorf("gathering the optimizer's state: %w", err)
	}
	if several || c.indexAlways {
		c.state = &stateIndex{c.metadata, map[string]string{}}
		for _, r := range ranges {
			c.state.WeightMap[c.rangeName(r.tensorRange)] = r.file
		}
	}
	for r, name := range names {
		result[r].Names[1], result[r].Index = name, several
	}
	return result, nil
}

// fileNames returns the file name of each rank that writes, and "" for other ranks. several reports
// whether several ranks write.
func fileNames(writers []bool, name func(k, n int) string) (names []string, several bool) {
	n := 0
	for _, w := range writers {
		if w {
			n++
		}
	}
	names = make([]string, len(writers))
	k := 0
	for r, w := range writers {
		if w {
			k++
			names[r] = name(k, n)
		}
	}
	return names, n != 1
}

// writeOwn writes and syncs this rank's weights and its part of the optimizer's state.
func (c *writer) writeOwn(ctx context.Context) (writtenFiles, error) {
	w := writtenFiles{Files: c.files}
	if len(c.weights) > 0 {
		err := c.writeTensors(ctx, c.names[0], c.weights, nil, func(i int) xpu.Tensor { return c.content[i].weight })
		if err != nil {
			return w, err
		}
		var buffer []float32
		for _, h := range c.content {
			if err := ctx.Err(); err != nil {
				return w, err
			}
			hash, err := c.hashOf(ctx, h, &buffer)
			if err != nil {
				return w, err
			}
			w.Hashes = append(w.Hashes, hash)
		}
	}
	if len(c.ranges) > 0 {
		var tensors []safetensors.Tensor
		for _, r := range c.ranges {
			tensors = append(tensors, c.rangeEntry(r))
		}
		var metadata map[string]string
		if !c.indexed {
			metadata = c.metadata
		}
		if err := c.writeTensors(ctx, c.names[1], tensors, metadata,
			func(i int) xpu.Tensor { return c.values[i] }); err != nil {
			return w, err
		}
	}
	if len(c.files) == 0 {
		return w, nil
	}
	return w, c.out.SyncDir(c.temp)
}

// writeTensors writes a safetensors file.
func (c *writer) writeTensors(ctx context.Context, name string, tensors []safetensors.Tensor,
	metadata map[string]string,
	values func(i int) xpu.Tensor) error {
	return c.writeFile(name, func(file io.Writer) error {
		buffered := bufio.NewWriterSize(file, writeSize(tensors))
		out, err := safetensors.NewWriter(buffered, tensors, metadata)
		if err != nil {
			return err
		}
		var buffer []float32
		for i, t := range tensors {
			err := pieces(ctx, c.device, values(i), &buffer, func(numbers []float32) error {
				return errors.Join(ctx.Err(), out.Float32(t.Name, numbers))
			})
			if err != nil {
				return err
			}
		}
		return errors.Join(out.Close(), buffered.Flush())
	})
}

// maxWrite is the most bytes of one write. A write that blocks keeps one of the GOMAXPROCS
// processors until the Go runtime notices it, up to 10 ms later. During a save in the background,
// the training step has one processor less for that time. With few large writes this is rare.
const maxWrite = 16 << 20

// writeSize returns the bytes of one write to a file of the tensors.
func writeSize(tensors []safetensors.Tensor) int {
	size := 0
	for _, t := range tensors {
		if size = size + int(t.Elements())*t.DType.Size(); size >= maxWrite {
			return maxWrite
		}
	}
	return size
}

// writeFile writes, hashes and syncs a file of the checkpoint. Its name is on disk after a sync of
// the directory.
func (c *writer) writeFile(name string, write func(file io.Writer) error) error {
	file, err := c.out.Create(filepath.Join(c.temp, name))
	if err != nil {
		return err
	}
	defer file.Abort()
	h := &hashingWriter{file, sha256.New(), 0}
	if err := write(h); err != nil {
		return err
	}
	if err := file.Rename(); err != nil {
		return err
	}
	c.files[name] = shards.FileInfo{Bytes: h.bytes, SHA256: hex.EncodeToString(h.hash.Sum(nil))}
	return nil
}

// A hashingWriter counts and hashes the written bytes.
type hashingWriter struct {
	io.Writer
	hash  hash.Hash
	bytes int64
}

func (w *hashingWriter) Write(p []byte) (int, error) {
	n, err := w.Writer.Write(p)
	w.hash.Write(p[:n])
	w.bytes += int64(n)
	return n, err
}

// writeOthers writes the files that belong to no single rank, except for the state and the
// manifest.
func (c *writer) writeOthers(tokenizer []byte) error {
	var config bytes.Buffer
	if err := moe.WriteConfigJSON(&config, c.config, c.tensors[0].DType); err != nil {
		return err
	}
	if err := c.writeBytes(modelConfig, config.Bytes()); err != nil {
		return err
	}
	if err := c.writeValue(generationFile, generationConfig(c.config)); err != nil {
		return err
	}
	if tokenizer != nil {
		if err := c.writeBytes(tokenizerFile, tokenizer); err != nil {
			return err
		}
	}
	if c.model != nil {
		if err := c.writeValue(modelIndexFile, c.model); err != nil {
			return err
		}
	}
	if c.state != nil {
		return c.writeValue(optimizerIndexFile, c.state)
	}
	return nil
}

func (c *writer) writeBytes(name string, content []byte) error {
	return c.writeFile(name, func(file io.Writer) error {
		_, err := file.Write(content)
		return err
	})
}

func (c *writer) writeValue(name string, value any) error {
	content, err := jsonText(value)
	if err != nil {
		return fmt.Errorf("writing %s: %w", name, err)
	}
	return c.writeBytes(name, content)
}

// finish writes the state and the manifest, and renames the directory.
func (c *writer) finish(name string, all []writtenFiles, state State) error {
	if err := c.writeValue(stateFile, state); err != nil {
		return err
	}
	m := manifest{Format: format, Step: state.Step, Files: c.files}
	for r, w := range all {
		for _, file := range slices.Sorted(maps.Keys(w.Files)) {
			if r == c.rank {
				continue
			}
			info, err := c.out.FS().Stat(filepath.Join(c.temp, file))
			if err != nil || info.Size() != w.Files[file].Bytes {
				return fmt.Errorf("%s, written by rank %d, is missing or does not have %d bytes; %s",
					filepath.Join(c.temp, file), r, w.Files[file].Bytes, needShared)
			}
			m.Files[file] = w.Files[file]
		}
	}
	if err := c.writeValue(manifestFile, m); err != nil {
		return err
	}
	return publish(c.out.FS(), c.temp, filepath.Join(c.dir, name))
}

// publish gives a complete temporary directory the name of a checkpoint. It replaces a checkpoint
// of that name, which it removes afterwards, because that can take minutes.
func publish(fsys filesystem.FS, temp, final string) error {
	out := atomicfile.On(fsys)
	if err := out.SyncDir(temp); err != nil {
		return err
	}
	gone, err := setAside(fsys, final)
	if err != nil {
		return err
	}
	if err := rename(fsys, temp, final); err != nil {
		return err
	}
	if err := out.SyncDir(filepath.Dir(final)); err != nil {
		return err
	}
	return filesystem.RemoveAll(fsys, gone)
}

func jsonText(value any) ([]byte, error) {
	data, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return nil, err
	}
	return append(data, '\n'), nil
}

// Discard removes a checkpoint if it exists. It renames the directory first, so that a
// partly removed directory never has the name of a checkpoint.
func Discard(fsys filesystem.FS, path string) error {
	gone, err := setAside(fsys, path)
	if err != nil {
		return err
	}
	return filesystem.RemoveAll(fsys, gone)
}

// setAside gives a checkpoint, if it exists, a temporary name, which it returns.
func setAside(fsys filesystem.FS, path string) (gone string, err error) {
	gone = filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".old"+atomicfile.TempSuffix)
	if err := filesystem.RemoveAll(fsys, gone); err != nil {
		return "", err
	}
	if err := fsys.Rename(path, gone); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", err
	}
	return gone, nil
}

// Kept describes the checkpoints that [Prune] keeps.
type Kept struct {
	Newest int // number of newest checkpoints
	// If not negative, also the newest checkpoint of at most BackTo steps and all newer ones.
	BackTo int64
	// If not 0, the models of all steps that are multiples of ModelEvery; see [FinishModels].
	ModelEvery int64
}

// Prune removes old checkpoints, the refused checkpoints, and temporary files of killed processes.
func Prune(fsys filesystem.FS, dir string, keep Kept, refused []Refused) error {
	names, err := list(fsys, dir)
	if err != nil {
		return err
	}
	var errs []error
	kept, enough := 0, keep.BackTo < 0 // enough: a checkpoint for a rollback is kept
	for _, name := range names {
		damaged := slices.ContainsFunc(refused, func(r Refused) bool { return r.Checkpoint == name })
		step, _ := stepOf(name)
		switch path := filepath.Join(dir, name); {
		case !damaged && (kept < keep.Newest || !enough):
			kept++
			enough = enough || step <= keep.BackTo
		case !damaged && keep.ModelEvery > 0 && step%keep.ModelEvery == 0:
			errs = append(errs, rename(fsys, path, filepath.Join(dir, hiddenModel(name))))
		default:
			errs = append(errs, Discard(fsys, path))
		}
	}
	return errors.Join(append(errs, FinishModels(fsys, dir), RemoveTemporary(fsys, dir))...)
}

// hiddenModel is the name of a checkpoint that becomes a model. [RemoveTemporary] keeps it.
func hiddenModel(name string) string { return "." + name + ".model" }

// FinishModels moves models to the directory [ModelsDir] next to dir: the models of checkpoints in
// dir that [Prune] has chosen, also in a process that was killed.
func FinishModels(fsys filesystem.FS, dir string) error {
	entries, err := fsys.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	models := filepath.Join(filepath.Dir(dir), ModelsDir)
	var errs []error
	for _, e := range entries {
		name := strings.TrimSuffix(strings.TrimPrefix(e.Name(), "."), ".model")
		if _, ok := stepOf(name); ok && e.Name() == hiddenModel(name) {
			errs = append(errs, moveModel(fsys, filepath.Join(dir, e.Name()), models, name))
		}
	}
	return errors.Join(errs...)
}

func moveModel(fsys filesystem.FS, from, models, name string) error {
	entries, err := fsys.ReadDir(from)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if onlyResumes(e.Name()) {
			if err := fsys.Remove(filepath.Join(from, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := filesystem.MkdirAll(fsys, models, 0o755); err != nil {
		return err
	}
	if err := RemoveTemporary(fsys, models); err != nil {
		return err
	}
	to := filepath.Join(models, name) // exists if the run went back
	if err := Discard(fsys, to); err != nil {
		return err
	}
	if err := rename(fsys, from, to); err != nil {
		return err
	}
	return atomicfile.On(fsys).SyncDir(models)
}

// onlyResumes reports whether a file of a checkpoint, or of its copy, is not part of the model.
func onlyResumes(name string) bool {
	return name == manifestFile || name == stateFile || strings.HasPrefix(name, "optimizer") ||
		strings.HasPrefix(name, recordsDir+"/")
}

// rename renames a directory.
func rename(fsys filesystem.FS, from, to string) error {
	if err := atomicfile.Injected(atomicfile.OpRename, to); err != nil {
		return err
	}
	return fsys.Rename(from, to)
}

// RemoveTemporary removes temporary checkpoints and temporary files of killed processes.
func RemoveTemporary(fsys filesystem.FS, dir string) error {
	entries, err := fsys.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if name := e.Name(); strings.HasPrefix(name, ".") && strings.HasSuffix(name, atomicfile.TempSuffix) {
			errs = append(errs, filesystem.RemoveAll(fsys, filepath.Join(dir, name)))
		}
	}
	return errors.Join(errs...)
}

// generationConfig returns the fields of generation_config.json, with the ids of the begin, end and
// padding tokens for transformers.
func generationConfig(c moe.Config) map[string]any {
	fields := map[string]any{"_from_model_config": true}
	for name, id := range map[string]int{"bos_token_id": c.BOSTokenID, "eos_token_id": c.EOSTokenID,
		"pad_token_id": c.PadTokenID} {
		if id != moe.NoToken {
			fields[name] = id
		}
	}
	return fields
}
