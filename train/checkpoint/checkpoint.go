// Package checkpoint saves the state of a run and its model, verifies and loads checkpoints, and
// converts models between forms. docs/formats/run.md describes the files. A checkpoint is a Hugging
// Face model directory.
//
// A checkpoint does not depend on the layout of the ranks that wrote it: each rank saves and loads
// its [Shard], whose names and ranges refer to the whole model. A directory with the name of a
// checkpoint is complete.
package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"

	"mula/blend"
	"mula/internal/filesystem"
	"mula/moe/safetensors"
	"mula/shards"
	"mula/train/collective"
	"mula/train/spikes"
	"mula/xpu/comm"
)

// DirName is the name of the directory of all checkpoints in a run directory.
const DirName = "checkpoints"

// ModelsDir is the name of the directory of all models in a run directory that [Prune] keeps.
const ModelsDir = "models"

// Names in a checkpoint.
const (
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

const (
	// format is the format of manifest.json and state.json. Format 1 always had one file of weights
	// and one file of the optimizer's state. Its State.Weights was the SHA-256 of all weights in
	// sequence.
	format = 2
	// maximum bytes of a JSON file of a checkpoint; the index of thousands of ranks has tens of
	// megabytes
	maxStateFile = 256 << 20
)

// ErrAllDamaged means that every checkpoint in a directory is damaged.
var ErrAllDamaged = errors.New("every checkpoint is damaged; restore one of them, or remove them to restart from " +
	"step 0")

// ErrNone means that a directory has no checkpoint, not even a damaged one.
var ErrNone = errors.New("no checkpoint")

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
	// hash of the weights, see docs/formats/run.md; in format 1 the SHA-256 of all weights in
	// sequence
	Weights string `json:"weights"`

	Spikes *spikes.State `json:"spikes,omitempty"` // nil if spikes.action is "none"

	// the fields that determine the outcome of training, by full name, as JSON text
	Config map[string]string `json:"config"`
}

// manifest is manifest.json, the last file of a checkpoint.
type manifest struct {
	Format int                        `json:"format"` // as State.Format
	Step   int64                      `json:"step"`
	Files  map[string]shards.FileInfo `json:"files"`
}

// Name returns the name of the directory of a step's checkpoint.
func Name(step int64) string { return fmt.Sprintf("step-%08d", step) }

var namePattern = regexp.MustCompile(`^step-([0-9]{8,18})$`)

// stepOf is the inverse of Name.
func stepOf(name string) (int64, bool) {
	m := namePattern.FindStringSubmatch(name)
	if m == nil {
		return 0, false
	}
	step, err := strconv.ParseInt(m[1], 10, 64)
	return step, err == nil && Name(step) == name
}

// list returns the directories in dir that have the name of a checkpoint, newest first.
// It returns none if dir does not exist.
func list(fsys filesystem.FS, dir string) ([]string, error) {
	entries, err := fsys.ReadDir(dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var steps []int64
	for _, e := range entries {
		if step, ok := stepOf(e.Name()); ok {
			steps = append(steps, step)
		}
	}
	slices.Sort(steps)
	slices.Reverse(steps)
	names := make([]string, len(steps))
	for i, step := range steps {
		names[i] = Name(step)
	}
	return names, nil
}

// A Checkpoint is a checkpoint whose files have the hashes of its manifest, except that the files
// of a [Candidate] for its weights and its optimizer's state have not been read.
type Checkpoint struct {
	Dir   string
	State State

	fsys     filesystem.FS // of Dir
	manifest manifest
	snapshot *snapshotSource // nil for a checkpoint
}

// Refused is a checkpoint that could not be used, and the reason.
type Refused struct {
	Checkpoint string `json:"checkpoint"`
	Error      string `json:"error"`
}

// Newest returns the newest complete checkpoint in dir, and the newer damaged checkpoints. Without
// a checkpoint it returns nil. If all checkpoints are damaged, it returns [ErrAllDamaged], because
// a restart would remove checkpoints that the user may be able to repair. It also returns an error
// if the checkpoint to use cannot be read: a resume from an older checkpoint would later remove
// this checkpoint, which may be complete. All ranks of world call it and get the same result. fsys
// is the file system of dir; nil means the machine's.
func Newest(ctx context.Context, world *comm.Comm, fsys filesystem.FS, dir string) (*Checkpoint, []Refused, error) {
	return newest(ctx, world, filesystem.Default(fsys), dir, nil, true)
}

// Candidate is [Newest] for a checkpoint that is loaded next: the files that [Shard.Load] reads are
// not read here, and their damage is found there. Candidate does not use the checkpoints in
// refused.
func Candidate(ctx context.Context, world *comm.Comm, fsys filesystem.FS, dir string,
	refused []Refused) (*Checkpoint, []Refused, error) {
	return newest(ctx, world, filesystem.Default(fsys), dir, refused, false)
}

func newest(ctx context.Context, world *comm.Comm, fsys filesystem.FS, dir string, refusedBefore []Refused,
	all bool) (*Checkpoint, []Refused, error) {
	var names []string
	err := fromFirst(ctx, world, &names, func() (err error) {
		names, err = list(fsys, dir)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	var refused []Refused
	var errs []error
	for _, name := range names {
		if i := slices.IndexFunc(refusedBefore, func(r Refused) bool { return r.Checkpoint == name }); i >= 0 {
			refused = append(refused, refusedBefore[i])
			errs = append(errs, fmt.Errorf("%s: %s", name, refusedBefore[i].Error))
			continue
		}
		c, err := verify(ctx, world, fsys, filepath.Join(dir, name), all)
		if ctx.Err() != nil {
			return nil, nil, ctx.Err()
		}
		if err == nil {
			return c, refused, nil
		}
		if !damaged(err) {
			return nil, refused, fmt.Errorf("checkpoint %s cannot be read, and may be complete: %w; make it "+
				"readable, or move it away to resume from the previous checkpoint", name, err)
		}
		refused = append(refused, Refused{name, err.Error()})
		errs = append(errs, fmt.Errorf("%s: %w", name, err))
	}
	if errs != nil {
		return nil, refused, fmt.Errorf("%s: %w: %w", dir, ErrAllDamaged, errors.Join(errs...))
	}
	return nil, nil, nil
}

// NewestUntil returns the newest complete checkpoint in dir of at most step steps that has the
// state of spikes, or nil, and the paths of all newer directories with the name of a checkpoint,
// newest first. The files that [Shard.Load] reads are not verified. It warns of damaged
// checkpoints. All ranks of world call it and get the same result.
func NewestUntil(ctx context.Context, world *comm.Comm, fsys filesystem.FS, dir string, step int64,
	warn func(format string, args ...any)) (found *Checkpoint, newer []string, err error) {
	fsys = filesystem.Default(fsys)
	var names []string
	if world.Rank() == 0 { // other ranks may see an older state of the directory
		names, err = list(fsys, dir)
	}
	if err := collective.Agree(ctx, world, err); err != nil {
		return nil, nil, err
	}
	if err := collective.Broadcast(ctx, world, &names); err != nil {
		return nil, nil, err
	}
	for _, name := range names {
		path := filepath.Join(dir, name)
		if at, _ := stepOf(name); at <= step {
			c, err := verify(ctx, world, fsys, path, false)
			if ctx.Err() != nil {
				return nil, nil, ctx.Err()
			}
			if err == nil && c.State.Spikes == nil {
				err = errors.New("its state.json has no spikes")
			}
			if err == nil {
				return c, newer, nil
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

// Find finds and verifies a checkpoint. dir is a checkpoint or a run directory. For a run
// directory, Find returns the newest complete checkpoint, and the newer checkpoints that
// are damaged. It returns [ErrNone] if a run directory has no checkpoint.
func Find(ctx context.Context, dir string) (*Checkpoint, []Refused, error) {
	if _, err := os.Stat(filepath.Join(dir, manifestFile)); err == nil {
		c, err := verify(ctx, comm.NewSingle(), filesystem.OS{}, dir, true)
		if err != nil {
			if !damaged(err) {
				return nil, nil, fmt.Errorf("checkpoint %s cannot be read: %w", dir, err)
			}
			return nil, nil, fmt.Errorf("checkpoint %s is damaged: %w", dir, err)
		}
		return c, nil, nil
	}
	if info, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil, nil, fmt.Errorf("%s: %w; name a run's folder, a checkpoint or a Hugging Face model", dir,
			fs.ErrNotExist)
	} else if err != nil {
		return nil, nil, err
	} else if !info.IsDir() {
		return nil, nil, fmt.Errorf("%s is a file; name a run's folder, a checkpoint or a Hugging Face model", dir)
	}
	c, refused, err := Newest(ctx, comm.NewSingle(), nil, filepath.Join(dir, DirName))
	if err == nil && c == nil {
		err = fmt.Errorf("%s: %w; name a checkpoint or a run's folder that has one", dir, ErrNone)
	}
	return c, refused, err
}

// Name is the name of the checkpoint's directory, such as "step-00000100".
func (c *Checkpoint) Name() string { return filepath.Base(c.Dir) }
