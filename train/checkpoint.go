package train

import (
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
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"mula/blend"
	"mula/internal/atomicfile"
	"mula/internal/strictjson"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/shards"
	"mula/train/collective"
	"mula/train/spikes"
	"mula/xpu"
	"mula/xpu/comm"
)

// Names in a run directory and in a checkpoint.
const (
	checkpointsDir = "checkpoints"

	manifestFile   = "manifest.json"
	stateFile      = "state.json"
	modelFile      = safetensors.SingleName
	generationFile = "generation_config.json"
	modelConfig    = "config.json"
	optimizerFile  = "optimizer.safetensors"
	tokenizerFile  = "tokenizer.json"

	// In a checkpoint of several ranks.
	modelIndexFile     = safetensors.IndexName
	optimizerIndexFile = "optimizer.safetensors.index.json"
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

const (
	// checkpointFormat is the format of manifest.json and state.json. Format 1 always had one file
	// of weights and one file of the optimizer's state. Its State.Weights was the SHA-256 of all
	// weights in sequence.
	checkpointFormat = 2
	// maximum bytes of a JSON file of a checkpoint; the index of thousands of ranks has tens of
	// megabytes
	maxStateFile = 256 << 20
)

// ErrNoCheckpoint means that a directory has no checkpoint, not even a damaged one.
var ErrNoCheckpoint = errors.New("no checkpoint")

// errNewer is wrapped by the error about a checkpoint with a newer format.
var errNewer = errors.New("written by a newer version of mula")

// State is state.json: the progress of a run, and everything else that resuming it needs.
type State struct {
	Format int   `json:"format"` // 2, or 1 if an older version wrote it
	Step   int64 `json:"step"`   // steps done; also the number of the next step
	// steps that changed the weights. Not counted: steps whose samples were all skipped, by the
	// plan or because of a spike, and steps without an unmasked target
	Updates int64        `json:"updates"`
	Tokens  int64        `json:"tokens"` // tokens read in these steps
	Cursor  blend.Cursor `json:"cursor"`
	// The values that a change of plan must not change.
	SequenceLength int `json:"sequence_length"`
	// SHA-256 of the tokenizer.json of the plan's shards, if the plan has it
	Tokenizer string `json:"tokenizer,omitempty"`

	Seed uint64 `json:"seed"`
	// arithmetic of the last steps; see [xpu.Device] and [moe.OrderOfSums]
	Arithmetic string `json:"arithmetic"`

	FirstLoss float64 `json:"first_loss"` // loss of the first step that changed the weights
	LastLoss  float64 `json:"last_loss"`  // loss of the last step that changed the weights
	// hash of the weights, see docs/formats/run.md; in format 1 the SHA-256 of all weights in sequence
	Weights string `json:"weights"`

	Spikes *spikes.State `json:"spikes,omitempty"` // nil if spikes.action is "none"

	// the fields that determine the outcome of training, by full name, as JSON text
	Config map[string]string `json:"config"`
}

// checkpointManifest is manifest.json, the last file of a checkpoint.
type checkpointManifest struct {
	Format int                        `json:"format"` // as State.Format
	Step   int64                      `json:"step"`
	Files  map[string]shards.FileInfo `json:"files"`
}

func checkpointName(step int64) string { return fmt.Sprintf("step-%08d", step) }

var checkpointPattern = regexp.MustCompile(`^step-([0-9]{8,18})$`)

// checkpointStep is the inverse of checkpointName.
func checkpointStep(name string) (int64, bool) {
	m := checkpointPattern.FindStringSubmatch(name)
	if m == nil {
		return 0, false
	}
	step, err := strconv.ParseInt(m[1], 10, 64)
	return step, err == nil && checkpointName(step) == name
}

// listCheckpoints returns the directories in dir that have the name of a checkpoint, newest first.
// It returns none if dir does not exist.
func listCheckpoints(dir string) ([]string, error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var steps []int64
	for _, e := range entries {
		if step, ok := checkpointStep(e.Name()); ok {
			steps = append(steps, step)
		}
	}
	slices.Sort(steps)
	slices.Reverse(steps)
	names := make([]string, len(steps))
	for i, step := range steps {
		names[i] = checkpointName(step)
	}
	return names, nil
}

// verifyCheckpoint compares every file of a checkpoint with the manifest and returns the state.
// Errors name the file. All ranks of world call it. Each rank reads some of the files, and all get
// the same result.
func verifyCheckpoint(ctx context.Context, world *comm.Comm, dir string) (State, error) {
	var m checkpointManifest
	if err := fromFirst(ctx, world, &m, func() error { return readManifest(dir, &m) }); err != nil {
		return State{}, err
	}
	if err := allJudge(ctx, world, verifyFiles(ctx, dir, m, world.Rank(), world.Size())); err != nil {
		return State{}, err
	}
	var s State
	err := fromFirst(ctx, world, &s, func() error {
		if err := readJSON(filepath.Join(dir, stateFile), &s); err != nil {
			return err
		}
		switch {
		case s.Format != m.Format:
			return fmt.Errorf("%s has format %d, but its manifest has format %d", filepath.Join(dir, stateFile),
				s.Format, m.Format)
		case s.Step != m.Step || s.Step < 0 || s.Updates < 0 || s.Updates > s.Step:
			return fmt.Errorf("%s is of step %d with %d updates, but its manifest is of step %d",
				filepath.Join(dir, stateFile), s.Step, s.Updates, m.Step)
		}
		return nil
	})
	return s, err
}

// readManifest reads the manifest of a checkpoint and checks the sizes of the files in it. It finds
// a truncated large file without reading the file.
func readManifest(dir string, m *checkpointManifest) error {
	path := filepath.Join(dir, manifestFile)
	var version struct {
		Format int `json:"format"`
	}
	if err := decodeFile(path, &version, strictjson.DecodeLoosely); err != nil {
		return err
	}
	if version.Format > checkpointFormat {
		return fmt.Errorf("%s has format %d, %w; this version reads 1 to %d", path, version.Format, errNewer,
			checkpointFormat)
	}
	if err := readJSON(path, m); err != nil {
		return err
	}
	if m.Format < 1 {
		return fmt.Errorf("%s has format %d; this version reads 1 to %d", path, m.Format, checkpointFormat)
	}
	if step, ok := checkpointStep(filepath.Base(dir)); ok && step != m.Step {
		return fmt.Errorf("%s is of step %d", path, m.Step)
	}
	if _, ok := m.Files[stateFile]; !ok {
		return fmt.Errorf("%s does not list %s", path, stateFile)
	}
	for _, names := range [][2]string{{modelFile, modelIndexFile}, {optimizerFile, optimizerIndexFile}} {
		_, single := m.Files[names[0]]
		_, index := m.Files[names[1]]
		switch {
		case m.Format == 1 && !single:
			return fmt.Errorf("%s does not list %s", path, names[0])
		case !single && !index:
			return fmt.Errorf("%s lists neither %s nor %s", path, names[0], names[1])
		case !single:
			// It would be read instead of the files that the index names.
			if _, err := os.Lstat(filepath.Join(dir, names[0])); err == nil {
				return fmt.Errorf("%s does not list the existing file %s, which belongs to another checkpoint", path,
					names[0])
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(m.Files)) {
		if name != filepath.Base(name) || name == manifestFile {
			return fmt.Errorf("%s lists %q, which is not the name of a checkpoint file", path, name)
		}
		if info, err := os.Stat(filepath.Join(dir, name)); errors.Is(err, fs.ErrNotExist) {
			return &missingFile{filepath.Join(dir, name), ", and " + manifestFile + " lists the file"}
		} else if err != nil {
			return err
		} else if want := m.Files[name]; info.Size() != want.Bytes {
			return fmt.Errorf("%s has %d bytes, but %s says %d; one of the two files was changed",
				filepath.Join(dir, name), info.Size(), manifestFile, want.Bytes)
		}
	}
	return nil
}

// verifyFiles compares the hashes of this rank's files of a checkpoint with the manifest. The sizes
// were checked before.
func verifyFiles(ctx context.Context, dir string, m checkpointManifest, rank, size int) error {
	names := slices.Sorted(maps.Keys(m.Files))
	bytes, ranks := make([]int64, len(names)), make([]int, size)
	for i, name := range names {
		bytes[i] = m.Files[name].Bytes
	}
	for r := range ranks {
		ranks[r] = r
	}
	for i, owner := range distribute(bytes, ranks, make([]int64, size)) {
		if owner != rank {
			continue
		}
		path, want := filepath.Join(dir, names[i]), m.Files[names[i]]
		hash, size, err := shards.HashFile(ctx, path, nil)
		switch {
		case ctx.Err() != nil && errors.Is(err, ctx.Err()):
			return unjudged{err}
		case rank != 0 && errors.Is(err, fs.ErrNotExist):
			return unjudged{fmt.Errorf("cannot see %s, which rank 0 sees; %s", path, needShared)}
		case err != nil:
			return err
		case size != want.Bytes || hash != want.SHA256:
			return fmt.Errorf("%s has SHA-256 %s, but %s says %s; one of the two files was changed", path, hash,
				manifestFile, want.SHA256)
		}
	}
	return nil
}

// needShared is the remedy if ranks do not see the same run directory.
const needShared = "set output to a directory on a file system that all ranks share"

// An unjudged error leaves open whether a checkpoint is complete.
type unjudged struct{ error }

func (e unjudged) Unwrap() error { return e.error }

// A judgement is the result of one rank's verification of a checkpoint.
type judgement struct {
	collective.Failure
	Unjudged bool `json:"unjudged,omitempty"`
}

// allJudge combines the errors of all ranks about a checkpoint to an error that is the same on all
// ranks. The checkpoint is damaged if one rank has found damage.
func allJudge(ctx context.Context, world *comm.Comm, err error) error {
	if world.Size() == 1 {
		return err
	}
	all, gatherErr := collective.Gather(ctx, world, judgement{collective.FailureOf(err), err != nil && !damaged(err)})
	if gatherErr != nil {
		return unjudged{gatherErr}
	}
	var failures []collective.Failure
	decided := false
	for _, j := range all {
		failures = append(failures, j.Failure)
		decided = decided || j.Error != "" && !j.Unjudged
	}
	joined := collective.JoinFailures(failures, -1, nil)
	if joined != nil && !decided {
		return unjudged{joined}
	}
	return joined
}

// fromFirst calls read on rank 0 to fill value, and sends the value or the error to all ranks.
func fromFirst[T any](ctx context.Context, world *comm.Comm, value *T, read func() error) error {
	if world.Size() == 1 {
		return read()
	}
	var err error
	var own *T
	if world.Rank() == 0 {
		err, own = read(), value
	}
	values, gatherErr := collective.Gather(ctx, world, own)
	if gatherErr != nil {
		return unjudged{gatherErr}
	}
	*value = *values[0]
	return allJudge(ctx, world, err)
}

// A missingFile is the error about a checkpoint that lacks a file.
type missingFile struct{ path, listed string }

func (e *missingFile) Error() string { return e.path + " is missing" + e.listed }
func (e *missingFile) Unwrap() error { return fs.ErrNotExist }

// readJSON reads a small JSON file. It refuses unknown and repeated fields.
func readJSON(path string, value any) error { return decodeFile(path, value, strictjson.Decode) }

// decodeFile reads a small JSON file with a function of package strictjson.
func decodeFile(path string, value any, decode func([]byte, any) error) error {
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return &missingFile{path, ""}
	}
	if err != nil {
		return err
	}
	if info.Size() > maxStateFile {
		return fmt.Errorf("%s has %d bytes; the maximum is %d", path, info.Size(), maxStateFile)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := decode(data, value); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// saveCheckpoint writes a checkpoint of state.Step into dir. Every rank of world writes its weights
// and its part of the optimizer's state. Rank 0 also writes the state and the configuration, and
// tokenizer.json with the content of tokenizer, unless that is nil. All files are in a temporary
// directory, which rank 0 creates. Rank 0 writes the manifest after every rank has synced its
// files, and then renames the directory, so a directory with the name of a checkpoint is complete.
// An existing directory of that name is a refused checkpoint, and is replaced. saveCheckpoint sets
// state.Format and state.Weights. If a rank fails, all ranks return an error that names it, and
// older checkpoints do not change.
func saveCheckpoint(ctx context.Context, world *comm.Comm, dir string, state *State, s share,
	tokenizer []byte) (err error) {
	name := checkpointName(state.Step)
	defer func() {
		if err != nil {
			err = fmt.Errorf("saving checkpoint %s: %w", name, err)
		}
	}()
	c := savedCheckpoint{share: s, rank: world.Rank(), dir: dir, files: map[string]shards.FileInfo{}}
	if c.rank == 0 {
		c.temp = filepath.Join(dir, "."+name+atomicfile.TempSuffix)
		if world.Size() > 1 {
			// a new name, because a rank may still write to the directory of an earlier attempt
			c.temp = atomicfile.TempName(filepath.Join(dir, name))
		}
		err = c.begin()
		defer os.RemoveAll(c.temp) // no effect after the rename
	}
	if err := c.meet(ctx, world, err); err != nil {
		return err
	}
	if err := c.plan(ctx, world); err != nil {
		return err
	}
	// From here on, a failed rank still takes part in collective calls.
	written, err := c.writeOwn(ctx)
	if err == nil && c.rank == 0 {
		err = c.writeOthers(tokenizer)
	}
	written.Failure = collective.FailureOf(err)
	all, gatherErr := collective.Gather(ctx, world, written)
	if gatherErr != nil {
		return errors.Join(err, gatherErr)
	}
	var lists [][]tensorHash
	var failures []collective.Failure
	for _, w := range all {
		lists, failures = append(lists, w.Hashes), append(failures, w.Failure)
	}
	if err := collective.Combine(world, failures, err); err != nil {
		return err
	}
	state.Format = checkpointFormat
	if state.Weights, err = s.combine(lists); err != nil {
		return collective.OfAll(world, err)
	}
	if c.rank == 0 {
		err = c.finish(name, all, *state)
	}
	return collective.Agree(ctx, world, err)
}

// A savedCheckpoint is a checkpoint while one rank writes it.
type savedCheckpoint struct {
	share
	rank      int
	dir, temp string

	weights []safetensors.Tensor       // tensors that this rank writes
	content []heldTensor               // values of weights
	ranges  []tensorRange              // ranges of the optimizer's state that this rank writes
	values  []xpu.Tensor               // values of ranges
	names   [2]string                  // names of its files of weights and state, "" for no file
	model   *safetensors.Index         // over all ranks; nil for a single file
	state   *stateIndex                // likewise
	files   map[string]shards.FileInfo // written by this rank
}

// writtenFiles is the message of a rank that has written its files.
type writtenFiles struct {
	collective.Failure
	Files  map[string]shards.FileInfo `json:"files"`
	Hashes []tensorHash               `json:"hashes"`
}

// begin creates the temporary directory.
func (c *savedCheckpoint) begin() error {
	if err := os.MkdirAll(c.dir, 0o755); err != nil {
		return err
	}
	if err := os.RemoveAll(c.temp); err != nil {
		return err
	}
	if err := atomicfile.Injected(atomicfile.OpCreate, c.temp); err != nil {
		return err
	}
	return os.Mkdir(c.temp, 0o755)
}

// meet sends the name of rank 0's directory, or its error, to all ranks.
func (c *savedCheckpoint) meet(ctx context.Context, world *comm.Comm, own error) error {
	type place struct {
		collective.Failure
		Temp string `json:"temp"` // the name in dir
	}
	all, err := collective.Gather(ctx, world, place{collective.FailureOf(own), filepath.Base(c.temp)})
	if err != nil {
		return errors.Join(own, err)
	}
	var failures []collective.Failure
	for _, p := range all {
		failures = append(failures, p.Failure)
	}
	c.temp = filepath.Join(c.dir, all[0].Temp)
	return collective.Combine(world, failures, own)
}

// plan decides what each rank writes, and into which files. All ranks compute the same plan.
func (c *savedCheckpoint) plan(ctx context.Context, world *comm.Comm) error {
	type contribution struct {
		collective.Failure
		Runs     []indexRun        `json:"runs"`
		Ranges   [][4]int          `json:"ranges"` // as tensorRange
		Metadata map[string]string `json:"metadata"`
	}
	var err error
	if c.ranges, c.values, err = c.written(); err == nil {
		if _, missing := os.Stat(c.temp); missing != nil {
			err = fmt.Errorf("cannot see %s, which rank 0 has created: %w; %s", c.temp, missing, needShared)
		}
	}
	own, failed := contribution{Failure: collective.FailureOf(err), Runs: c.runs(), Metadata: c.metadata}, err
	for _, r := range c.ranges {
		own.Ranges = append(own.Ranges, [4]int{r.tensor, r.state, r.begin, r.end})
	}
	all, err := collective.Gather(ctx, world, own)
	if err != nil {
		return err
	}
	var failures []collective.Failure
	var runs [][]indexRun
	for r, other := range all {
		failures, runs = append(failures, other.Failure), append(runs, other.Runs)
		if !maps.Equal(other.Metadata, all[0].Metadata) {
			return collective.OfAll(world,
				fmt.Errorf("the optimizer's scalars are %v on rank 0, but %v on rank %d; resume "+
					"from an older checkpoint",
					all[0].Metadata, other.Metadata, r))
		}
	}
	if err := collective.Combine(world, failures, failed); err != nil {
		return err
	}

	// The weights: whole tensors, each once.
	owner, err := assign(c.tensors, runs)
	if err != nil {
		return collective.OfAll(world, err)
	}
	writers := make([]bool, len(all))
	for _, r := range owner {
		writers[r] = true
	}
	names, several := fileNames(writers, modelShardName)
	if several {
		c.model = &safetensors.Index{Metadata: map[string]any{"total_size": 4 * c.config.TotalParameters()},
			WeightMap: map[string]string{}}
		for i, t := range c.tensors {
			c.model.WeightMap[t.Name] = names[owner[i]]
		}
	}
	for _, h := range c.held {
		if owner[h.index] == c.rank {
			c.weights, c.content = append(c.weights, c.tensors[h.index]), append(c.content, h)
		}
	}
	c.names[0] = names[c.rank]

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
	if _, err := c.place(ranges); err != nil {
		return collective.OfAll(world, fmt.Errorf("gathering the optimizer's state: %w", err))
	}
	if several {
		c.state = &stateIndex{c.metadata, map[string]string{}}
		for _, r := range ranges {
			c.state.WeightMap[c.rangeName(r.tensorRange)] = r.file
		}
	}
	c.names[1] = names[c.rank]
	return nil
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
func (c *savedCheckpoint) writeOwn(ctx context.Context) (writtenFiles, error) {
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
		if c.state == nil {
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
	return w, atomicfile.SyncDir(c.temp)
}

// writeTensors writes a safetensors file of F32 tensors.
func (c *savedCheckpoint) writeTensors(ctx context.Context, name string, tensors []safetensors.Tensor,
	metadata map[string]string,
	values func(i int) xpu.Tensor) error {
	return c.writeFile(name, func(file io.Writer) error {
		out, err := safetensors.NewWriter(file, tensors, metadata)
		if err != nil {
			return err
		}
		var buffer []float32
		for i, t := range tensors {
			numbers, err := xpu.Numbers(ctx, c.device, values(i), &buffer)
			if err == nil {
				err = errors.Join(ctx.Err(), out.Float32(t.Name, numbers))
			}
			if err != nil {
				return err
			}
		}
		return out.Close()
	})
}

// writeFile writes, hashes and syncs a file of the checkpoint. Its name is on disk after a sync of
// the directory.
func (c *savedCheckpoint) writeFile(name string, write func(file io.Writer) error) error {
	file, err := atomicfile.Create(filepath.Join(c.temp, name))
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
func (c *savedCheckpoint) writeOthers(tokenizer []byte) error {
	var config bytes.Buffer
	if err := moe.WriteConfigJSON(&config, c.config, safetensors.F32); err != nil {
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

func (c *savedCheckpoint) writeBytes(name string, content []byte) error {
	return c.writeFile(name, func(file io.Writer) error {
		_, err := file.Write(content)
		return err
	})
}

func (c *savedCheckpoint) writeValue(name string, value any) error {
	content, err := jsonText(value)
	if err != nil {
		return fmt.Errorf("writing %s: %w", name, err)
	}
	return c.writeBytes(name, content)
}

// finish writes the state and the manifest, and renames the directory.
func (c *savedCheckpoint) finish(name string, all []writtenFiles, state State) error {
	if err := c.writeValue(stateFile, state); err != nil {
		return err
	}
	m := checkpointManifest{Format: checkpointFormat, Step: state.Step, Files: c.files}
	for r, w := range all {
		for _, file := range slices.Sorted(maps.Keys(w.Files)) {
			if r == c.rank {
				continue
			}
			info, err := os.Stat(filepath.Join(c.temp, file))
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
	if err := atomicfile.SyncDir(c.temp); err != nil {
		return err
	}
	final := filepath.Join(c.dir, name)
	if err := discardCheckpoint(final); err != nil {
		return err
	}
	if err := atomicfile.Injected(atomicfile.OpRename, final); err != nil {
		return err
	}
	if err := os.Rename(c.temp, final); err != nil {
		return err
	}
	return atomicfile.SyncDir(c.dir)
}

func jsonText(value any) ([]byte, error) {
	data, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return nil, err
	}
	return append(data, '\n'), nil
}

func writeJSON(path string, value any) error {
	data, err := jsonText(value)
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return atomicfile.WriteFile(path, data)
}

// discardCheckpoint removes a checkpoint if it exists. It renames the directory first, so that a
// partly removed directory never has the name of a checkpoint.
func discardCheckpoint(path string) error {
	gone := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".old"+atomicfile.TempSuffix)
	if err := os.RemoveAll(gone); err != nil {
		return err
	}
	if err := os.Rename(path, gone); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	return os.RemoveAll(gone)
}

// pruneCheckpoints removes old checkpoints, the refused checkpoints, and temporary files of killed
// processes. It keeps the newest keep checkpoints. If backTo is not negative, it also keeps the
// newest checkpoint of at most backTo steps and all newer ones.
func pruneCheckpoints(dir string, keep int, backTo int64, refused []RefusedCheckpoint) error {
	names, err := listCheckpoints(dir)
	if err != nil {
		return err
	}
	var errs []error
	kept, enough := 0, backTo < 0 // enough: a checkpoint for a rollback is kept
	for _, name := range names {
		damaged := slices.ContainsFunc(refused, func(r RefusedCheckpoint) bool { return r.Checkpoint == name })
		if !damaged && (kept < keep || !enough) {
			kept++
			step, _ := checkpointStep(name)
			enough = enough || step <= backTo
			continue
		}
		errs = append(errs, discardCheckpoint(filepath.Join(dir, name)))
	}
	return errors.Join(append(errs, removeTemporary(dir))...)
}

// removeTemporary removes temporary checkpoints and temporary files of killed processes.
func removeTemporary(dir string) error {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	var errs []error
	for _, e := range entries {
		if name := e.Name(); strings.HasPrefix(name, ".") && strings.HasSuffix(name, atomicfile.TempSuffix) {
			errs = append(errs, os.RemoveAll(filepath.Join(dir, name)))
		}
	}
	return errors.Join(errs...)
}

// A Checkpoint is a complete checkpoint whose files have the hashes of its manifest.
type Checkpoint struct {
	Dir   string
	State State
}

// RefusedCheckpoint is a checkpoint that could not be used, and the reason.
type RefusedCheckpoint struct {
	Checkpoint string `json:"checkpoint"`
	Error      string `json:"error"`
}

// newestCheckpoint returns the newest complete checkpoint in dir, and the newer damaged
// checkpoints. Without a checkpoint it returns nil. It returns an error if all checkpoints are
// damaged, because a restart would remove checkpoints that the user may be able to repair. It also
// returns an error if the checkpoint to use cannot be read: a resume from an older checkpoint would
// later remove this checkpoint, which may be complete. All ranks of world call it and get the same
// result.
func newestCheckpoint(ctx context.Context, world *comm.Comm, dir string) (*Checkpoint, []RefusedCheckpoint, error) {
	var names []string
	err := fromFirst(ctx, world, &names, func() (err error) {
		names, err = listCheckpoints(dir)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	var refused []RefusedCheckpoint
	var errs []error
	for _, name := range names {
		path := filepath.Join(dir, name)
		state, err := verifyCheckpoint(ctx, world, path)
		if ctx.Err() != nil {
			return nil, nil, ctx.Err()
		}
		if err == nil {
			return &Checkpoint{path, state}, refused, nil
		}
		if !damaged(err) {
			return nil, refused, fmt.Errorf("checkpoint %s cannot be read, and may be complete: %w; make it "+
				"readable, or move it away to resume from the previous checkpoint", name, err)
		}
		refused = append(refused, RefusedCheckpoint{name, err.Error()})
		errs = append(errs, fmt.Errorf("%s: %w", name, err))
	}
	if errs != nil {
		return nil, refused, fmt.Errorf("%s: every checkpoint is damaged; restore one of them, or remove them to "+
			"restart from step 0: %w", dir, errors.Join(errs...))
	}
	return nil, nil, nil
}

// newestUntil returns the newest complete checkpoint in dir of at most step steps that has the
// state of spikes, or nil, and the paths of all newer directories with the name of a checkpoint,
// newest first. It warns of damaged checkpoints. All ranks of world call it and get the same
// result.
func newestUntil(ctx context.Context, world *comm.Comm, dir string, step int64,
	warn func(format string, args ...any)) (found *Checkpoint, newer []string, err error) {
	names, err := listCheckpoints(dir)
	if err := collective.Agree(ctx, world, err); err != nil {
		return nil, nil, err
	}
	lists, err := collective.Gather(ctx, world, names)
	if err != nil {
		return nil, nil, err
	}
	for _, name := range lists[0] { // other ranks may see an older state of the directory
		path := filepath.Join(dir, name)
		if at, _ := checkpointStep(name); at <= step {
			state, err := verifyCheckpoint(ctx, world, path)
			if ctx.Err() != nil {
				return nil, nil, ctx.Err()
			}
			if err == nil && state.Spikes == nil {
				err = errors.New("its state.json has no spikes")
			}
			if err == nil {
				return &Checkpoint{path, state}, newer, nil
			}
			if !damaged(err) {
				return nil, nil, fmt.Errorf("checkpoint %s cannot be read, and may be complete: %w", name, err)
			}
			warn("checkpoint %s is damaged; using an older one: %v", name, err)
		}
		newer = append(newer, path)
	}
	return nil, newer, nil
}

// damaged reports whether an error of verifyCheckpoint means that the checkpoint is damaged: its
// content is wrong, or files are missing. Other errors may be temporary, such as a file server that
// does not answer, or concern a format of a newer version.
func damaged(err error) bool {
	if errors.Is(err, errNewer) || errors.As(err, new(unjudged)) {
		return false
	}
	var failed *fs.PathError
	return !errors.As(err, &failed) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
}

// LoadCheckpoint finds and verifies a checkpoint. dir is a checkpoint or a run directory. For a run
// directory, LoadCheckpoint returns the newest complete checkpoint, and the newer checkpoints that
// are damaged. It returns [ErrNoCheckpoint] if a run directory has no checkpoint.
func LoadCheckpoint(ctx context.Context, dir string) (*Checkpoint, []RefusedCheckpoint, error) {
	if _, err := os.Stat(filepath.Join(dir, manifestFile)); err == nil {
		state, err := verifyCheckpoint(ctx, comm.NewSingle(), dir)
		if err != nil {
			if !damaged(err) {
				return nil, nil, fmt.Errorf("checkpoint %s cannot be read: %w", dir, err)
			}
			return nil, nil, fmt.Errorf("checkpoint %s is damaged: %w", dir, err)
		}
		return &Checkpoint{dir, state}, nil, nil
	}
	if info, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("%s: %w; name a run's folder, a checkpoint or a Hugging Face model", dir,
			fs.ErrNotExist)
	} else if err != nil {
		return nil, nil, err
	} else if !info.IsDir() {
		return nil, nil, fmt.Errorf("%s is a file; name a run's folder, a checkpoint or a Hugging Face model", dir)
	}
	c, refused, err := newestCheckpoint(ctx, comm.NewSingle(), filepath.Join(dir, checkpointsDir))
	if err == nil && c == nil {
		err = fmt.Errorf("%s: %w; name a checkpoint or a run's folder that has one", dir, ErrNoCheckpoint)
	}
	return c, refused, err
}

// Name is the name of the checkpoint's directory, such as "step-00000100".
func (c *Checkpoint) Name() string { return filepath.Base(c.Dir) }

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
