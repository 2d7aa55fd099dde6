package checkpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"mula/blend"
	"mula/internal/filesystem"
	"mula/internal/filesystem/objectfs"
	"mula/internal/objects"
	"mula/internal/strictyaml"
	"mula/moe"
	"mula/shards"
	"mula/tokenize"
	"mula/train/collective"
	"mula/train/foreign"
	"mula/xpu"
)

// A ModelDir is a directory with a model in Hugging Face's format: a checkpoint of a run, or a
// model from another source.
type ModelDir struct {
	Dir        string      // or a URL
	Checkpoint *Checkpoint // nil if the model is not a checkpoint

	// The training state in a checkpoint of another framework, which has the weights; nil: the
	// weights are in Dir. Dir has the other files of the model.
	Foreign *foreign.State

	fsys filesystem.FS // of Dir; nil: of the machine

	// the layers of multi-token prediction that are part of the model; see [moe.OpenStoredWith]
	predictionLayers int
}

// stored opens the weights.
func (m ModelDir) stored() (*moe.Stored, error) {
	if m.Foreign == nil {
		return moe.OpenStoredWith(m.files(), m.Dir, m.predictionLayers)
	}
	c, err := moe.ReadConfig(m.files(), m.Dir)
	if err != nil {
		return nil, err
	}
	return m.Foreign.Stored(c, foreign.Weights)
}

func (m ModelDir) files() filesystem.FS { return filesystem.Default(m.fsys) }

func (m ModelDir) path(name string) string { return objects.Join(m.Dir, name) }

// FindModel finds the model in dir: the newest complete checkpoint of a run directory, a
// checkpoint, or a Hugging Face directory. For a run it also returns the newer checkpoints that are
// damaged. It returns [ErrNone] if dir has no model. dir may also be the URL of a Hugging Face
// model, of a copy of a checkpoint, or of a folder of copies ([Store]). Requests end with ctx.
func FindModel(ctx context.Context, dir string) (ModelDir, []Refused, error) {
	if objects.IsURL(dir) {
		m, err := findStored(ctx, dir)
		return m, nil, err
	}
	checkpoint, refused, err := Find(ctx, dir)
	if err == nil {
		return ModelDir{Dir: checkpoint.Dir, Checkpoint: checkpoint}, refused, nil
	}
	if !errors.Is(err, ErrNone) {
		return ModelDir{}, refused, err
	}
	// With a state.json it would be a checkpoint that has lost its manifest.
	if _, lost := os.Stat(filepath.Join(dir, stateFile)); lost == nil {
		return ModelDir{}, refused, err
	}
	if _, found := os.Stat(filepath.Join(dir, "config.json")); found != nil {
		return ModelDir{}, refused, fmt.Errorf("%s: %w, and no config.json of a Hugging Face model; name a model, a "+
			"checkpoint or a run's folder that has one", dir, ErrNone)
	}
	return ModelDir{Dir: dir}, refused, nil
}

// Model creates the model on a device.
func (m ModelDir) Model(dev xpu.Device) (*moe.Model, error) {
	stored, err := moe.OpenStored(m.files(), m.Dir)
	if err != nil {
		return nil, err
	}
	defer stored.Close()
	return stored.Model(dev)
}

// Load reads the weights into the model that the ranks of a run hold. All ranks call it, and
// together read each weight once. It needs only Dir. Requests to a store end with ctx. Only some
// ranks get an error of reading.
func (m ModelDir) Load(ctx context.Context, model *moe.Model) error {
	broken, err := model.LoadTogether(ctx, objectfs.New(ctx, m.fsys, ""), m.Dir)
	if broken {
		err = &collective.BrokenError{Err: err}
	}
	return err
}

// Tokenizer reads the model's tokenizer.json. The error wraps [fs.ErrNotExist] if there is none.
func (m ModelDir) Tokenizer(o tokenize.LoadOptions) (*tokenize.Tokenizer, error) {
	text, err := m.readCompanion(tokenizerFile)
	if err != nil {
		return nil, err
	}
	return tokenize.ParseWith(text, m.path(tokenizerFile), o)
}

// TokenizerHash is the SHA-256, in hexadecimal, of the tokenizer.json that the model was trained
// with. For a checkpoint it is the hash in its plan, if known. Otherwise it is the hash of the
// model's tokenizer.json, or "" without this file.
func (m ModelDir) TokenizerHash(ctx context.Context) (string, error) {
	if m.Checkpoint != nil && m.Checkpoint.State.Tokenizer != "" {
		return m.Checkpoint.State.Tokenizer, nil
	}
	hash, _, err := shards.HashFile(ctx, m.path(tokenizerFile), nil)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	return hash, err
}

// CheckTokenizer returns an error if the model and the plan's shards have different tokenizers. It
// compares nothing if one of the hashes is unknown.
func (m ModelDir) CheckTokenizer(ctx context.Context, p *blend.Plan) error {
	model, err := m.TokenizerHash(ctx)
	if err != nil {
		return err
	}
	if plan := p.TokenizerHash(); plan != "" && model != "" && plan != model {
		err := fmt.Errorf("%s: the model's tokenizer has SHA-256 %.16s…, but the plan's shards were made with "+
			"%.16s…, whose ids mean different text; tokenize the documents with the model's tokenizer.json and "+
			"build a plan of those shards", m.Dir, model, plan)
		if m.Checkpoint == nil {
			err = fmt.Errorf("%w; if it is the same tokenizer in another form, replace the file by the plan's "+
				"tokenizer.json", err)
		}
		return err
	}
	return nil
}

// FindInitial returns the model that supplies the initial weights of a run. path is the run's
// initialize_from. It fails if the model does not match the run's configuration and plan.
func FindInitial(ctx context.Context, path string, want moe.Config, plan *blend.Plan,
	warn func(format string, args ...any)) (ModelDir, error) {
	bad := func(err error) (ModelDir, error) {
		return ModelDir{}, fmt.Errorf("initialize_from: %w", err)
	}
	from, refused, err := FindModel(ctx, path)
	for _, r := range refused {
		warn("initialize_from: checkpoint %s is damaged; using an older one: %s", r.Checkpoint, r.Error)
	}
	if err != nil {
		return bad(err)
	}
	if err := from.CheckConfig(want); err != nil {
		return bad(err)
	}
	if from.predictionLayers = want.PredictionLayers; from.predictionLayers > 0 {
		if err := from.checkPredictions(ctx); err != nil {
			return bad(err)
		}
	}
	if err := from.CheckTokenizer(ctx, plan); err != nil {
		return bad(err)
	}
	return from, nil
}

// checkPredictions checks that the model has its layers of multi-token prediction, and that an
// embedding and a head that they repeat are the model's.
func (m ModelDir) checkPredictions(ctx context.Context) error {
	stored, err := m.stored()
	if err == nil {
		defer stored.Close()
		err = stored.CheckPredictions(ctx)
	}
	if err != nil {
		return fmt.Errorf("model.num_nextn_predict_layers is %d: %w", m.predictionLayers, err)
	}
	return nil
}

// CheckConfig returns an error if the model's config.json describes another function than want, the
// model of a train.yaml. It does not compare settings of training: the number of layers of
// multi-token prediction, the capacity of experts, and noise of routers that config.json cannot
// have.
func (m ModelDir) CheckConfig(want moe.Config) error {
	model, err := moe.ReadConfig(m.files(), m.Dir)
	if err != nil {
		return err
	}
	model.PredictionLayers = want.PredictionLayers
	model.ExpertCapacity = want.ExpertCapacity
	if !model.HasJitterField() {
		model.RouterJitter = want.RouterJitter
	}
	if differences := differentFields(model, want); differences != nil {
		return fmt.Errorf("%s is a different model than train.yaml describes: %s; write its values under model",
			m.Dir, strings.Join(differences, ", "))
	}
	return nil
}

// differentFields names the fields that differ between the model there and the configuration here,
// if they change the model's function or are needed for the plan's windows.
func differentFields(there, here moe.Config) []string {
	// These are for initialization or for other programs, or are compared with the plan.
	free := []string{"initializer_range", "initializer_cutoff", "router_aux_loss_coef", "bos_token_id", "eos_token_id",
		"max_position_embeddings"}
	a, b := strictyaml.Fields(there), strictyaml.Fields(here)
	both := maps.Clone(a)
	maps.Copy(both, b)
	var differences []string
	for _, name := range slices.Sorted(maps.Keys(both)) {
		if a[name] != b[name] && !slices.Contains(free, name) {
			differences = append(differences, fmt.Sprintf("model.%s is %s in the folder and %s in train.yaml", name,
				cmp.Or(a[name], "not set"), cmp.Or(b[name], "not set")))
		}
	}
	return differences
}

// modelYAML returns the value of model in a train.yaml for configuration c: the nearest preset and
// the differences from the preset.
func modelYAML(c moe.Config) string {
	want := strictyaml.Fields(c)
	var best string
	fewest := len(want) + 1
	for _, name := range moe.Presets() {
		preset, err := moe.Preset(name)
		if err != nil {
			continue
		}
		has, differ := strictyaml.Fields(preset), map[string]string{}
		for field, value := range want {
			if has[field] != value {
				differ[field] = value
			}
		}
		if len(differ) < fewest {
			best, fewest = "{preset: "+name, len(differ)
			if fewest > 0 {
				best += ", " + flowMap(differ)
			}
			best += "}"
		}
	}
	return best
}

// flowMap writes fields as a YAML map in one line, without its braces. A name with a dot is in a
// nested map.
func flowMap(fields map[string]string) string {
	flat, nested := map[string]string{}, map[string]map[string]string{}
	for name, value := range fields {
		if outer, inner, ok := strings.Cut(name, "."); !ok {
			flat[name] = value
		} else if nested[outer] == nil {
			nested[outer] = map[string]string{inner: value}
		} else {
			nested[outer][inner] = value
		}
	}
	for outer, inner := range nested {
		flat[outer] = "{" + flowMap(inner) + "}"
	}
	var parts []string
	for _, name := range slices.Sorted(maps.Keys(flat)) {
		parts = append(parts, name+": "+flat[name])
	}
	return strings.Join(parts, ", ")
}
