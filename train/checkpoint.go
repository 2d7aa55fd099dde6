package train

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"mula/blend"
	"mula/internal/atomicfile"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/shards"
)

// Names in a run directory and in a checkpoint.
const (
	checkpointsDir = "checkpoints"

	manifestFile   = "manifest.json"
	stateFile      = "state.json"
	modelFile      = safetensors.SingleName
	generationFile = "generation_config.json"
	optimizerFile  = "optimizer.safetensors"
	tokenizerFile  = "tokenizer.json"
)

const (
	checkpointFormat = 1
	maxStateFile     = 16 << 20 // bytes of a manifest.json or state.json that is read; real ones have a few kB
)

// ErrNoCheckpoint means that a directory holds no checkpoint at all, not even a damaged one.
var ErrNoCheckpoint = errors.New("no checkpoint")

// errNewer is wrapped by the error about a checkpoint of a format that this version does not know.
var errNewer = errors.New("that of a newer mula")

// State is state.json: where the run stands and what it must go on with.
type State struct {
	Format  int          `json:"format"`  // 1
	Step    int64        `json:"step"`    // steps done, and so the number of the next one
	Updates int64        `json:"updates"` // steps that changed the weights: all but those whose samples were all skipped, by the plan or because of a spike
	Tokens  int64        `json:"tokens"`  // targets trained on
	Cursor  blend.Cursor `json:"cursor"`
	// What an accepted change of plan must leave as it is.
	SequenceLength int    `json:"sequence_length"`
	Tokenizer      string `json:"tokenizer,omitempty"` // SHA-256 of the tokenizer.json that made the plan's shards, if the plan knows it

	Seed       uint64 `json:"seed"`
	Arithmetic string `json:"arithmetic"` // with which the last steps were computed; see [xpu.Device] and [moe.OrderOfSums]

	FirstLoss float64 `json:"first_loss"` // of the first step whose update was made
	LastLoss  float64 `json:"last_loss"`  // of the last one
	Weights   string  `json:"weights"`    // see WeightsHash

	Spikes *SpikeState `json:"spikes,omitempty"` // nil if spikes.action is none

	Config map[string]string `json:"config"` // the fields that decide the outcome of training, as JSON text, by full name
}

// checkpointManifest is manifest.json, the last file of a checkpoint.
type checkpointManifest struct {
	Format int                        `json:"format"` // 1
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

// listCheckpoints returns the directories in dir that have the name of a checkpoint, newest first. A dir that does not exist has none.
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

// verifyCheckpoint reads every file of a checkpoint and compares it with the manifest, and returns the state. Errors name the file.
func verifyCheckpoint(ctx context.Context, dir string) (State, error) {
	var m checkpointManifest
	if err := readJSON(filepath.Join(dir, manifestFile), &m); err != nil {
		return State{}, err
	}
	if m.Format > checkpointFormat {
		return State{}, fmt.Errorf("%s has format %d, %w; this version reads %d", filepath.Join(dir, manifestFile), m.Format, errNewer, checkpointFormat)
	}
	if m.Format != checkpointFormat {
		return State{}, fmt.Errorf("%s has format %d; this version reads %d", filepath.Join(dir, manifestFile), m.Format, checkpointFormat)
	}
	for _, name := range []string{stateFile, modelFile, optimizerFile} {
		if _, ok := m.Files[name]; !ok {
			return State{}, fmt.Errorf("%s does not list %s", filepath.Join(dir, manifestFile), name)
		}
	}
	for _, name := range sortedKeys(m.Files) {
		if name != filepath.Base(name) || name == manifestFile {
			return State{}, fmt.Errorf("%s lists %q, which is not a file of a checkpoint", filepath.Join(dir, manifestFile), name)
		}
		path, want := filepath.Join(dir, name), m.Files[name]
		// The size is looked at first: a truncated file of many gigabytes is found without reading it.
		if info, err := os.Stat(path); err != nil {
			return State{}, err
		} else if info.Size() != want.Bytes {
			return State{}, fmt.Errorf("%s has %d bytes, its manifest says %d", path, info.Size(), want.Bytes)
		}
		hash, size, err := shards.HashFile(ctx, path, nil)
		if err != nil {
			return State{}, err
		}
		if size != want.Bytes || hash != want.SHA256 {
			return State{}, fmt.Errorf("%s has SHA-256 %s, its manifest says %s", path, hash, want.SHA256)
		}
	}
	var s State
	if err := readJSON(filepath.Join(dir, stateFile), &s); err != nil {
		return State{}, err
	}
	switch {
	case s.Format != checkpointFormat:
		return State{}, fmt.Errorf("%s has format %d; this version reads %d", filepath.Join(dir, stateFile), s.Format, checkpointFormat)
	case s.Step != m.Step || s.Step < 0 || s.Updates < 0 || s.Updates > s.Step:
		return State{}, fmt.Errorf("%s is of step %d with %d updates, its manifest of step %d", filepath.Join(dir, stateFile), s.Step, s.Updates, m.Step)
	}
	if step, ok := checkpointStep(filepath.Base(dir)); ok && step != m.Step {
		return State{}, fmt.Errorf("%s is of step %d", filepath.Join(dir, manifestFile), m.Step)
	}
	return s, nil
}

// readJSON reads a small JSON file.
func readJSON(path string, value any) error {
	info, err := os.Stat(path)
	if err != nil {
		return err
	}
	if info.Size() > maxStateFile {
		return fmt.Errorf("%s has %d bytes; such a file has at most %d", path, info.Size(), maxStateFile)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(data, value); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// saveCheckpoint writes a checkpoint of the given step into dir. Its files go to a temporary directory, the manifest last, which then
// takes its name in one step: a directory with the name of a checkpoint was complete when it appeared. One that has the name already is
// replaced; it can only be one that was refused. write makes the files appear in the directory it is given.
func saveCheckpoint(ctx context.Context, dir string, step int64, write func(dir string) error) (err error) {
	name := checkpointName(step)
	defer func() {
		if err != nil {
			err = fmt.Errorf("saving checkpoint %s: %w", name, err)
		}
	}()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	temp, final := filepath.Join(dir, "."+name+atomicfile.TempSuffix), filepath.Join(dir, name)
	if err := os.RemoveAll(temp); err != nil {
		return err
	}
	if err := fault(atomicfile.OpCreate, temp); err != nil {
		return err
	}
	if err := os.Mkdir(temp, 0o755); err != nil {
		return err
	}
	defer os.RemoveAll(temp) // after the rename there is nothing
	m := checkpointManifest{Format: checkpointFormat, Step: step, Files: map[string]shards.FileInfo{}}
	if err := write(temp); err != nil {
		return err
	}
	entries, err := os.ReadDir(temp)
	if err != nil {
		return err
	}
	for _, e := range entries {
		hash, size, err := shards.HashFile(ctx, filepath.Join(temp, e.Name()), nil)
		if err != nil {
			return err
		}
		m.Files[e.Name()] = shards.FileInfo{Bytes: size, SHA256: hash}
	}
	if err := writeJSON(filepath.Join(temp, manifestFile), m); err != nil {
		return err
	}
	if err := discardCheckpoint(final); err != nil {
		return err
	}
	if err := fault(atomicfile.OpRename, final); err != nil {
		return err
	}
	if err := os.Rename(temp, final); err != nil {
		return err
	}
	return atomicfile.SyncDir(dir)
}

func writeJSON(path string, value any) error {
	data, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return atomicfile.WriteFile(path, append(data, '\n'))
}

// discardCheckpoint removes a checkpoint if it is there. It loses its name first, so that one that is half removed never has it.
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

// pruneCheckpoints removes all but the newest keep checkpoints of dir, and, if backTo is not negative, the newest of at most that many steps and
// all after it; those in refused; and what killed processes left behind.
func pruneCheckpoints(dir string, keep int, backTo int64, refused []RefusedCheckpoint) error {
	names, err := listCheckpoints(dir)
	if err != nil {
		return err
	}
	var errs []error
	kept, enough := 0, backTo < 0 // enough: one to go back to is kept
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

// removeTemporary removes what killed processes left behind: temporary checkpoints, and temporary files.
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

// newestCheckpoint returns the newest checkpoint in dir that is whole, and the newer ones that are not. Without any it returns nil; it is an
// error if there are checkpoints and all are damaged, because to start anew would throw away what may be saved by hand. It is one, too, if a
// checkpoint that would be taken cannot be read: to go on from an older one would end in the removal of one that may be whole.
func newestCheckpoint(ctx context.Context, dir string) (*Checkpoint, []RefusedCheckpoint, error) {
	names, err := listCheckpoints(dir)
	if err != nil {
		return nil, nil, err
	}
	var refused []RefusedCheckpoint
	var errs []error
	for _, name := range names {
		path := filepath.Join(dir, name)
		state, err := verifyCheckpoint(ctx, path)
		if ctx.Err() != nil {
			return nil, nil, ctx.Err()
		}
		if err == nil {
			return &Checkpoint{path, state}, refused, nil
		}
		if !damaged(err) {
			return nil, refused, fmt.Errorf("checkpoint %s cannot be read, and may be whole: %w; see to it that this mula can read it, or move it away to go on from the one before", name, err)
		}
		refused = append(refused, RefusedCheckpoint{name, err.Error()})
		errs = append(errs, fmt.Errorf("%s: %w", name, err))
	}
	if errs != nil {
		return nil, refused, fmt.Errorf("%s: every checkpoint is damaged; restore one, or remove them to start from the beginning: %w", dir, errors.Join(errs...))
	}
	return nil, nil, nil
}

// damaged reports whether an error of verifyCheckpoint speaks against the checkpoint: its content is wrong, or files are missing. Anything
// else, such as a file server that does not answer or a format of a newer version, may pass.
func damaged(err error) bool {
	if errors.Is(err, errNewer) {
		return false
	}
	var failed *fs.PathError
	return !errors.As(err, &failed) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR)
}

// LoadCheckpoint finds and verifies a checkpoint. dir is one, or a run directory, of which the newest complete one is taken; the newer ones
// that are damaged are returned, too. It is [ErrNoCheckpoint] if a run directory has none.
func LoadCheckpoint(ctx context.Context, dir string) (*Checkpoint, []RefusedCheckpoint, error) {
	if _, err := os.Stat(filepath.Join(dir, manifestFile)); err == nil {
		state, err := verifyCheckpoint(ctx, dir)
		if err != nil {
			if !damaged(err) {
				return nil, nil, fmt.Errorf("checkpoint %s cannot be read: %w", dir, err)
			}
			return nil, nil, fmt.Errorf("checkpoint %s is damaged: %w", dir, err)
		}
		return &Checkpoint{dir, state}, nil, nil
	}
	if info, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("%s: %w: name a run's folder, a checkpoint or a Hugging Face model", dir, fs.ErrNotExist)
	} else if err != nil {
		return nil, nil, err
	} else if !info.IsDir() {
		return nil, nil, fmt.Errorf("%s is a file: name the folder of a run, a checkpoint or a Hugging Face model", dir)
	}
	c, refused, err := newestCheckpoint(ctx, filepath.Join(dir, checkpointsDir))
	if err == nil && c == nil {
		err = fmt.Errorf("%s: %w here: it is neither a checkpoint nor a run directory with one", dir, ErrNoCheckpoint)
	}
	return c, refused, err
}

// Name is the name of the checkpoint's directory, as "step-00000100".
func (c *Checkpoint) Name() string { return filepath.Base(c.Dir) }

// tensors lists the tensors of optimizer.safetensors: those of a parameter side by side.
func (o *Optimizer) tensors() []safetensors.Tensor {
	var tensors []safetensors.Tensor
	for i, p := range o.parameters {
		for _, t := range o.saved(i) {
			tensors = append(tensors, safetensors.Tensor{Name: p.Name + "." + t.name, DType: safetensors.F32, Shape: p.Shape})
		}
	}
	return tensors
}

// write writes the optimizer's state as a safetensors file.
func (o *Optimizer) write(path string) error {
	file, err := atomicfile.Create(path)
	if err != nil {
		return err
	}
	defer file.Abort()
	out, err := safetensors.NewWriter(file, o.tensors(), o.metadata())
	if err != nil {
		return err
	}
	for i, p := range o.parameters {
		for _, t := range o.saved(i) {
			if err := out.Float32(p.Name+"."+t.name, t.values); err != nil {
				return err
			}
		}
	}
	if err := out.Close(); err != nil {
		return err
	}
	return file.Publish()
}

// read sets the state to that of a file that write has written, and the weights to those to train on.
func (o *Optimizer) read(path string) error {
	f, err := safetensors.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := errors.Join(sameTensors(o.tensors(), f.Tensors()), o.setMetadata(f.Metadata())); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	for i, p := range o.parameters {
		for _, t := range o.saved(i) {
			if err := f.Float32(t.values, p.Name+"."+t.name, 0); err != nil {
				return err
			}
		}
	}
	return nil
}

// sameTensors says where a file's tensors are not the expected ones.
func sameTensors(want, got []safetensors.Tensor) error {
	for i := range max(len(want), len(got)) {
		switch {
		case i >= len(got):
			return fmt.Errorf("tensor %s is missing", want[i].Name)
		case i >= len(want) || got[i].Name != want[i].Name || got[i].DType != want[i].DType || !slices.Equal(got[i].Shape, want[i].Shape):
			return fmt.Errorf("tensor %d is %s of %s %v, not one of this model and optimizer", i, got[i].Name, got[i].DType, got[i].Shape)
		}
	}
	return nil
}

// writeGenerationConfig writes the file in which transformers looks for the ids that begin, end and fill up generated text.
func writeGenerationConfig(path string, c moe.Config) error {
	fields := map[string]any{"_from_model_config": true}
	for name, id := range map[string]int{"bos_token_id": c.BOSTokenID, "eos_token_id": c.EOSTokenID, "pad_token_id": c.PadTokenID} {
		if id != moe.NoToken {
			fields[name] = id
		}
	}
	return writeJSON(path, fields)
}

// WeightsHash is the SHA-256 over the weights of all tensors in their order, as little-endian float32, in hexadecimal.
func WeightsHash(parameters []*moe.Parameter) string {
	hash := sha256.New()
	for _, p := range parameters {
		w := p.Weight
		hash.Write(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(w))), 4*len(w)))
	}
	return hex.EncodeToString(hash.Sum(nil))
}

func sortedKeys[K ~string, V any](m map[K]V) []K {
	keys := make([]K, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
