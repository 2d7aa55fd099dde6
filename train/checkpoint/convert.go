package checkpoint

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io/fs"
	"os"
	"path/filepath"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/locks"
	"mula/internal/objects"
	"mula/internal/quantity"
	"mula/moe"
	"mula/moe/safetensors"
	"mula/tokenize"
)

const tokenizerConfigFile = "tokenizer_config.json"

// companions are the files of a Hugging Face model without weights.
var companions = []string{tokenizerFile, tokenizerConfigFile, "special_tokens_map.json", "chat_template.jinja",
	generationFile}

// maxCompanion limits the bytes of such a file. The largest, a tokenizer.json, has tens of
// megabytes.
const maxCompanion = 1 << 30

// ConvertOptions are the options of [ModelDir.Convert].
type ConvertOptions struct {
	// element type of the weights; empty: unchanged, or F32 if the model has several types
	DType     safetensors.DType
	ShardSize int64                   // maximum bytes of weights per file, unless one tensor is larger; 0: one file
	Progress  func(done, total int64) // called after every chunk with the number of weights; may be nil
	Upcycle   *moe.Upcycling          // write the mixture of experts that it makes from the model; nil: the model
}

// An Inspection is the result of reading and checking a model on disk.
type Inspection struct {
	Config           moe.Config          `json:"-"`
	Parameters       int64               `json:"parameters"`
	ActiveParameters int64               `json:"active_parameters"`
	DTypes           []safetensors.DType `json:"dtypes"`         // element types of the weights, as stored
	Fused            bool                `json:"fused_experts"`  // the experts of a layer are one tensor
	Weights          string              `json:"weights_sha256"` // as State.Weights, of the weights as float32
	// hash of the model's tokenizer.json; "" if it does not exist
	Tokenizer string   `json:"tokenizer_sha256"`
	Tokens    int      `json:"tokenizer_ids"`   // vocabulary size of the tokenizer; 0 if mula cannot read it
	Notes     []string `json:"notes,omitempty"` // unusual properties that are not errors
	// value of model in a train.yaml for this model, as YAML
	TrainModel string `json:"train_model"`
}

// Inspect reads a model completely and checks it. Every tensor must exist with its shape, and no
// other tensor may exist. Every weight must be finite, and every id of the tokenizer must be in the
// vocabulary. progress may be nil.
//
// Layers of multi-token prediction are checked, too, but they are not in the result's Weights and
// numbers of parameters.
func (m ModelDir) Inspect(ctx context.Context, progress func(done, total int64)) (Inspection, error) {
	stored, err := m.stored()
	if err != nil {
		return Inspection{}, err
	}
	defer stored.Close()
	_, i, err := m.inspect(stored)
	if err != nil {
		return i, err
	}
	check := newWeightsCheck(m.Dir, i.Config, progress)
	if err := stored.Each(ctx, check.add); err != nil {
		return i, err
	}
	if err := stored.CheckPredictions(ctx); err != nil {
		return i, err
	}
	i.Weights = check.sum()
	return i, nil
}

// HasWeights reports whether the model's weights have a hash that a checkpoint of any format has.
// now is the hash of the model's weights. Format 1 has the SHA-256 of all weights in sequence
// instead.
func (m ModelDir) HasWeights(ctx context.Context, want string) (has bool, now string, err error) {
	inspected, err := m.Inspect(ctx, nil)
	if err != nil || inspected.Weights == want {
		return err == nil, inspected.Weights, err
	}
	stored, err := m.stored()
	if err != nil {
		return false, "", err
	}
	defer stored.Close()
	hash := sha256.New()
	err = stored.Each(ctx, func(_ string, piece []float32) error {
		hash.Write(bytesOf(piece))
		return nil
	})
	return hex.EncodeToString(hash.Sum(nil)) == want, inspected.Weights, err
}

// Convert writes the model into a new directory output, in the form that transformers 4 and 5 load:
// the family's tensors, weights in files of the requested size, config.json, and the tokenizer and
// generation config. The last two are copied from the model, or generated. Convert checks the model
// like [ModelDir.Inspect]. It reads and writes chunks, and never holds the whole model in memory.
// output must not exist. It appears complete or not at all. output may be a URL, see [newFolder].
//
// With o.Upcycle, the result describes the mixture of experts, except for DTypes. Weights is the
// hash of its weights before they are rounded to o.DType.
func (m ModelDir) Convert(ctx context.Context, output string, o ConvertOptions) (Inspection, error) {
	stored, err := m.stored()
	if err != nil {
		return Inspection{}, err
	}
	defer stored.Close()
	tokenizer, result, err := m.inspect(stored)
	if err != nil {
		return result, err
	}
	save := stored.Save
	if o.Upcycle != nil {
		c, err := result.Config.Upcycled(*o.Upcycle)
		if err != nil {
			return result, fmt.Errorf("upcycling %s: %w", m.Dir, err)
		}
		result.Notes = append(result.Notes, upcyclingNote(result.Config, c, *o.Upcycle))
		result.describe(c)
		save = func(ctx context.Context, dir string, opts moe.SaveOptions, visit func(string, []float32) error) error {
			return stored.SaveUpcycled(ctx, *o.Upcycle, dir, opts, visit)
		}
	}
	if o.DType == "" {
		o.DType = safetensors.F32
		if len(result.DTypes) == 1 {
			o.DType = result.DTypes[0]
		}
	}
	check := newWeightsCheck(m.Dir, result.Config, o.Progress)
	write := func(dir string, create moe.Creator) error {
		if err := m.writeCompanions(create, result.Config, tokenizer); err != nil {
			return err
		}
		return save(ctx, dir, moe.SaveOptions{DType: o.DType, ShardSize: o.ShardSize, Create: create}, check.add)
	}
	if objects.IsURL(output) {
		err = newFolder(ctx, output, func(create moe.Creator) error { return write(output, create) })
	} else {
		err = newDirectory(output, func(dir string) error { return write(dir, moe.In(dir)) })
	}
	if err != nil {
		return result, fmt.Errorf("writing %s: %w", output, err)
	}
	result.Weights = check.sum()
	return result, nil
}

// newDirectory creates a directory that appears complete or not at all. write creates the files in
// a temporary directory. newDirectory fails if path exists or if another process is creating it. It
// removes the temporary directory of a killed process.
func newDirectory(path string, write func(dir string) error) error {
	if err := nothingAt(path); err != nil {
		return err
	}
	parent := filepath.Dir(path)
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return err
	}
	temp := filepath.Join(parent, "."+filepath.Base(path)+atomicfile.TempSuffix)
	release, err := lockName(filepath.Join(parent, "."+filepath.Base(path)+".lock"+atomicfile.TempSuffix))
	switch {
	case errors.Is(err, locks.ErrHeld):
		return fmt.Errorf("another process is writing this directory, in %s; wait for it, or name another directory",
			temp)
	case errors.Is(err, errors.ErrUnsupported):
		// without locks, the temporary directory excludes other processes, and the user must remove
		// it
		release = func() {}
	case err != nil:
		return err
	}
	defer release()
	if err == nil {
		if err := errors.Join(nothingAt(path), os.RemoveAll(temp)); err != nil {
			// another process may have created it since
			return err
		}
	}
	if err := atomicfile.Injected(atomicfile.OpCreate, temp); err != nil {
		return err
	}
	if err := os.Mkdir(temp, 0o755); errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s exists: another process is writing the directory, or was killed; remove it if the "+
			"process was killed", temp)
	} else if err != nil {
		return err
	}
	defer os.RemoveAll(temp) // no effect after the rename
	if err := write(temp); err != nil {
		return err
	}
	if err := errors.Join(atomicfile.SyncDir(temp), atomicfile.Injected(atomicfile.OpRename, path)); err != nil {
		return err
	}
	if err := os.Rename(temp, path); err != nil {
		return err
	}
	return atomicfile.SyncDir(parent)
}

var errExists = errors.New("the output exists already, and mula does not overwrite it; name a new directory")

// nothingAt returns an error if path exists.
func nothingAt(path string) error {
	if _, err := os.Lstat(path); err == nil {
		return errExists
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// lockName creates and locks a file for this process. release removes the file. The lock ends with
// the process; a file that remains does not block other processes. The error is [locks.ErrHeld] if
// another process has the lock, and [errors.ErrUnsupported] if files cannot be locked.
func lockName(path string) (release func(), err error) {
	for {
		if err := atomicfile.Injected(atomicfile.OpCreate, path); err != nil {
			return nil, err
		}
		f, err := locks.Hold(path)
		if err != nil {
			if errors.Is(err, errors.ErrUnsupported) {
				os.Remove(path)
			}
			return nil, err
		}
		own, err := f.Stat()
		if err != nil {
			f.Close()
			return nil, err
		}
		if now, err := os.Stat(path); err == nil && os.SameFile(own, now) {
			return func() { os.Remove(path); f.Close() }, nil
		}
		f.Close() // the process that had the lock has removed the file, so this lock excludes no other process
	}
}

// upcyclingNote describes how a dense model became a mixture of experts.
func upcyclingNote(from, to moe.Config, u moe.Upcycling) string {
	text := fmt.Sprintf("upcycled from %s: each layer has %d experts, with %d of the network's %d intermediate "+
		"elements", from.Architecture, u.Experts, to.IntermediateSize, from.IntermediateSize)
	if u.Reinitialize == 0 {
		return text + "; its first logits equal the dense model's"
	}
	return text + fmt.Sprintf("; a fraction %g of the intermediate elements of each expert was drawn again",
		u.Reinitialize)
}

// describe sets the fields that are computed from the configuration of the model.
func (i *Inspection) describe(c moe.Config) {
	i.Config, i.Parameters, i.ActiveParameters = c, c.TotalParameters(), c.ActiveParameters()
	i.TrainModel = modelYAML(c)
}

// inspect does the part of an inspection that does not read weights. The tokenizer is nil if it
// does not exist or mula cannot read it.
func (m ModelDir) inspect(stored *moe.Stored) (*tokenize.Tokenizer, Inspection, error) {
	i := Inspection{DTypes: stored.Types(), Fused: stored.Fused()}
	i.describe(stored.Config())
	if stored.MXFP4() {
		i.Notes = append(i.Notes, "the experts are in MXFP4, which mula reads without rounding and does not write")
	}
	if n := stored.PredictionLayers(); n > 0 {
		note := "the files have %s of multi-token prediction: mula import and export copy them, but mula does not " +
			"train or use them"
		if stored.Config().TrainsPredictions() {
			note = "the files have %s of multi-token prediction: mula import and export copy them, mula train trains " +
				"them with model.num_nextn_predict_layers, and mula generate and eval do not use them"
		}
		i.Notes = append(i.Notes, fmt.Sprintf(note, quantity.Plural(int64(n), "layer")))
	}
	path := m.path(tokenizerFile)
	text, err := m.readCompanion(tokenizerFile)
	if errors.Is(err, fs.ErrNotExist) {
		i.Notes = append(i.Notes,
			"the model has no tokenizer.json, so AutoTokenizer and mula generate cannot work: copy the "+
				"tokenizer.json of its shards into "+filepath.ToSlash(m.Dir)+", and export again")
		return nil, i, nil
	}
	if err != nil {
		return nil, i, err
	}
	sum := sha256.Sum256(text)
	i.Tokenizer = hex.EncodeToString(sum[:])
	if m.Checkpoint != nil && m.Checkpoint.State.Tokenizer != "" && m.Checkpoint.State.Tokenizer != i.Tokenizer {
		return nil, i, fmt.Errorf("%s has SHA-256 %.16s…, but the model was trained with the tokenizer %.16s…; "+
			"remove the file, or replace it by that tokenizer", path, i.Tokenizer, m.Checkpoint.State.Tokenizer)
	}
	t, err := tokenize.ParseWith(text, path, tokenize.LoadOptions{IgnoreTruncationAndPadding: true})
	if err != nil {
		i.Notes = append(i.Notes, fmt.Sprintf("mula cannot read this tokenizer: %v", err))
		return nil, i, nil
	}
	if i.Tokens = t.VocabSize(); i.Tokens > i.Config.VocabSize {
		return nil, i, fmt.Errorf("%s has %d ids, but the model has a vocabulary of %d; use the tokenizer that the "+
			"model was trained with", path, i.Tokens, i.Config.VocabSize)
	}
	return t, i, nil
}

func (m ModelDir) readCompanion(name string) ([]byte, error) {
	path := m.path(name)
	info, err := m.files().Stat(path)
	if err != nil {
		return nil, err
	}
	if info.Size() > maxCompanion {
		return nil, fmt.Errorf("%s has %d bytes; the maximum is %d", path, info.Size(), maxCompanion)
	}
	return filesystem.ReadFile(m.files(), path)
}

// writeCompanions copies the companion files of a model, and creates missing files that
// transformers needs.
func (m ModelDir) writeCompanions(create moe.Creator, c moe.Config, t *tokenize.Tokenizer) error {
	there := map[string]bool{}
	for _, name := range companions {
		text, err := m.readCompanion(name)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		there[name] = true
		if err := create.WriteFile(name, text); err != nil {
			return err
		}
	}
	if !there[generationFile] {
		text, err := jsonText(generationConfig(c))
		if err != nil {
			return err
		}
		if err := create.WriteFile(generationFile, text); err != nil {
			return err
		}
	}
	if t != nil && !there[tokenizerConfigFile] {
		text, err := tokenizerConfig(c, t)
		if err != nil {
			return err
		}
		return create.WriteFile(tokenizerConfigFile, text)
	}
	return nil
}

// tokenizerConfig returns a tokenizer_config.json with which AutoTokenizer uses tokenizer.json
// unchanged. It also names the model's special tokens.
func tokenizerConfig(c moe.Config, t *tokenize.Tokenizer) ([]byte, error) {
	fields := map[string]any{
		"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": false,
		"model_max_length": c.MaxPositions,
	}
	for name, id := range map[string]int{"bos_token": c.BOSTokenID, "eos_token": c.EOSTokenID,
		"pad_token": c.PadTokenID} {
		if id == moe.NoToken {
			continue
		}
		text, err := t.Decode(nil, []uint32{uint32(id)})
		if err != nil {
			continue // an id beyond the tokenizer's ids, such as padding of the vocabulary
		}
		if back, ok := t.ID(string(text)); ok && back == uint32(id) {
			fields[name] = string(text)
		}
	}
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetEscapeHTML(false) // people read <|endoftext|>
	e.SetIndent("", "  ")
	err := e.Encode(fields)
	return text.Bytes(), err
}

// A weightsCheck checks that all weights of a model are finite. It gets them tensor by tensor, in
// any order of the tensors.
type weightsCheck struct {
	dir         string
	tensors     []safetensors.Tensor
	number      map[string]int      // of a tensor, by its name
	sums        [][sha256.Size]byte // of complete tensors
	done, total int64
	element     int64 // of the current tensor, of the next piece
	progress    func(done, total int64)
	hash        hash.Hash // of the current tensor
}

func newWeightsCheck(dir string, c moe.Config, progress func(done, total int64)) *weightsCheck {
	w := &weightsCheck{dir: dir, tensors: c.Tensors(), number: map[string]int{}, progress: progress, hash: sha256.New()}
	for i, t := range w.tensors {
		w.number[t.Name] = i
	}
	w.sums, w.total = make([][sha256.Size]byte, len(w.tensors)), elements(w.tensors)
	return w
}

// elements returns the number of elements of all tensors.
func elements(tensors []safetensors.Tensor) (n int64) {
	for _, t := range tensors {
		n += t.Elements()
	}
	return n
}

func (w *weightsCheck) add(tensor string, piece []float32) error {
	if err := moe.CheckFinite(w.dir, tensor, w.element, piece); err != nil {
		return err
	}
	w.hash.Write(bytesOf(piece))
	w.element += int64(len(piece))
	if i := w.number[tensor]; w.element == w.tensors[i].Elements() {
		w.sums[i] = [sha256.Size]byte(w.hash.Sum(nil))
		w.hash.Reset()
		w.element = 0
	}
	w.done += int64(len(piece))
	if w.progress != nil {
		w.progress(w.done, w.total)
	}
	return nil
}

// sum returns the hash of the weights after the last tensor.
func (w *weightsCheck) sum() string {
	all := newWeightsHasher()
	for i, t := range w.tensors {
		all.add(t.Name, t.Shape, w.sums[i])
	}
	return all.sum()
}
