// Package megatron reads and writes distributed checkpoints of Megatron core: the format torch_dist
// of megatron.core.dist_checkpointing, which is the format of torch.distributed.checkpoint with a
// file common.pt.
//
// The definitions are megatron/core/dist_checkpointing, megatron/core/optimizer/optimizer.py and
// distrib_optimizer.py of megatron-core 0.16.1. common.pt has the attributes of Megatron-LM's
// save_checkpoint (megatron/training/checkpointing.py).
package megatron

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"mula/internal/pickle"
	"mula/moe"
	"mula/moe/torchfile"
	"mula/train/foreign"
)

// Files of a checkpoint, and the file of a folder of checkpoints.
const (
	metadataFile = ".metadata"
	commonFile   = "common.pt"
	formatFile   = "metadata.json"
	latestFile   = "latest_checkpointed_iteration.txt"
)

// Find returns the directory of the checkpoint at dir, which is a checkpoint, or a folder of
// checkpoints with a file latest_checkpointed_iteration.txt. ok is false without a checkpoint.
func Find(dir string) (found string, ok bool) {
	if text, err := os.ReadFile(filepath.Join(dir, latestFile)); err == nil && len(text) < 1<<10 {
		name := strings.TrimSpace(string(text))
		if n, err := strconv.ParseUint(name, 10, 63); err == nil {
			name = fmt.Sprintf("iter_%07d", n)
		}
		if name == "release" || strings.HasPrefix(name, "iter_") {
			dir = filepath.Join(dir, name)
		}
	}
	_, err := os.Stat(filepath.Join(dir, formatFile))
	if err == nil {
		_, err = os.Stat(filepath.Join(dir, commonFile))
	}
	return dir, err == nil
}

// Open reads the checkpoint of a model of configuration c in a directory that [Find] has found.
func Open(dir string, c moe.Config) (*foreign.State, error) {
	if err := checkFormat(filepath.Join(dir, formatFile)); err != nil {
		return nil, err
	}
	tensors, err := readMetadata(dir)
	if err != nil {
		return nil, err
	}
	s := &foreign.State{Form: "Megatron core torch_dist", Dir: dir, Samples: -1}
	if tensors, err = withoutChains(tensors); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, metadataFile), err)
	}
	m := &model{config: c, dir: dir, files: &files{dir, map[*chunk]*torchfile.Tensor{}}, tensors: tensors}
	if err := m.readCommon(s); err != nil {
		return nil, err
	}
	if s.Parameters, err = m.parameters(); err != nil {
		return nil, err
	}
	if s.NoMoments == nil {
		s.NoMoments = m.findMoments()
	}
	return s, nil
}

// checkFormat checks metadata.json.
func checkFormat(path string) error {
	text, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	var format struct {
		Backend string `json:"sharded_backend"`
		Version int    `json:"sharded_backend_version"`
		Common  string `json:"common_backend"`
	}
	if err := json.Unmarshal(text, &format); err != nil {
		return fmt.Errorf("%s: %w; copy the file again", path, err)
	}
	if format.Backend != "torch_dist" || format.Version != 1 || format.Common != "torch" {
		return fmt.Errorf("%s: sharded_backend is %q, version %d, and common_backend %q; only torch_dist, version 1, "+
			"and torch are supported; save the checkpoint with --ckpt-format torch_dist", path, format.Backend,
			format.Version, format.Common)
	}
	return nil
}

// chain matches the prefix of the optimizers of Megatron's ChainedOptimizer.
var chain = regexp.MustCompile(`^chained_\d+\.`)

// withoutChains returns tensors by names without prefixes of chained optimizers, which have
// different parameters.
func withoutChains(tensors map[string]*tensor) (map[string]*tensor, error) {
	named := make(map[string]*tensor, len(tensors))
	for _, name := range slices.Sorted(maps.Keys(tensors)) {
		short := chain.ReplaceAllString(name, "")
		if other := named[short]; other != nil {
			return nil, fmt.Errorf("%s and %s are the same tensor of two optimizers", other.name, name)
		}
		named[short] = tensors[name]
	}
	return named, nil
}

// commonClasses are the classes in common.pt that are plain data. They are the classes that
// megatron/core/safe_globals.py names, without numpy's.
var commonClasses = map[pickle.Global]bool{
	"argparse.Namespace": true, "types.SimpleNamespace": true, "pathlib.PosixPath": true, "signal.Signals": true,
	"torch.torch_version.TorchVersion":                         true,
	"megatron.core.enums.ModelType":                            true,
	"megatron.core.optimizer.OptimizerConfig":                  true,
	"megatron.core.optimizer.optimizer_config.OptimizerConfig": true,
	"megatron.core.rerun_state_machine.RerunDiagnostic":        true,
	"megatron.core.rerun_state_machine.RerunMode":              true,
	"megatron.core.rerun_state_machine.RerunState":             true,
	"megatron.core.transformer.enums.AttnBackend":              true,
	"megatron.core.transformer.enums.CudaGraphScope":           true,
}

// readCommon reads common.pt: progress, the optimizer's settings, and the arguments of the run,
// which must fit the configuration.
func (m *model) readCommon(s *foreign.State) error {
	path := filepath.Join(m.dir, commonFile)
	f, err := torchfile.Open(path, func(g pickle.Global) bool { return commonClasses[g] || dtypes[g] })
	if err != nil {
		return err
	}
	root, ok := f.Root.(*pickle.Dict)
	if !ok {
		return fmt.Errorf("%s: not a dict", path)
	}
	v, _ := root.Get("iteration")
	if s.Step, ok = v.(int64); !ok || s.Step < 0 {
		return fmt.Errorf("%s: iteration is missing or not a number; only checkpoints of Megatron's save_checkpoint "+
			"are supported", path)
	}
	if v, ok := root.Get("args"); ok {
		args, ok := v.(*pickle.Object)
		if !ok {
			return fmt.Errorf("%s: args is not an object", path)
		}
		if err := m.checkArguments(args); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if v, _ := args.Attribute("consumed_train_samples"); v != nil {
			if s.Samples, ok = v.(int64); !ok || s.Samples < 0 {
				return fmt.Errorf("%s: args.consumed_train_samples is not a number", path)
			}
		}
	}
	o, ok := root.Get("optimizer")
	if !ok {
		s.NoMoments = fmt.Errorf("%s has no optimizer; the checkpoint was saved with --no-save-optim", path)
		return nil
	}
	var groups []pickle.Value
	updates, err := m.optimizer(o, &groups, 0)
	if err != nil {
		return fmt.Errorf("%s: optimizer: %w", path, err)
	}
	s.Settings = foreign.Settings(groups, "betas", "eps", "weight_decay", "wd_mult", "lr")
	if s.Updates = updates; updates < 0 {
		s.NoMoments = fmt.Errorf("%s has no number of updates of the optimizer; save the checkpoint with "+
			"--dist-ckpt-optim-fully-reshardable", path)
	}
	return nil
}

// optimizer finds the groups of parameters in the common state of an optimizer, which may have
// several optimizers, and returns the number of updates, or -1.
func (m *model) optimizer(v pickle.Value, groups *[]pickle.Value, depth int) (int64, error) {
	d, ok := v.(*pickle.Dict)
	if !ok || depth > 3 {
		return -1, nil
	}
	updates := int64(-1)
	add := func(n int64) error {
		if updates >= 0 && n >= 0 && n != updates {
			return fmt.Errorf("%d updates of some parameters, and %d of others", updates, n)
		}
		updates = max(updates, n)
		return nil
	}
	for _, pair := range d.Pairs {
		if pair.Key == "param_groups" {
			list, ok := pair.Value.(*pickle.List)
			if !ok {
				return -1, errors.New("param_groups is not a list")
			}
			*groups = append(*groups, list.Items...)
			for _, item := range list.Items {
				group, ok := item.(*pickle.Dict)
				if !ok {
					return -1, errors.New("param_groups is not a list of dicts")
				}
				if step, ok := group.Get("step"); ok {
					n, err := foreign.Count(step)
					if err == nil {
						err = add(n)
					}
					if err != nil {
						return -1, err
					}
				}
			}
			continue
		}
		n, err := m.optimizer(pair.Value, groups, depth+1)
		if err == nil {
			err = add(n)
		}
		if err != nil {
			return -1, err
		}
	}
	return updates, nil
}

// findMoments returns an error if the checkpoint does not have all moments.
func (m *model) findMoments() error {
	for name := range m.tensors {
		if strings.HasPrefix(name, "optimizer.distributed.") {
			return fmt.Errorf("%s: the optimizer state is stored as buffers of data-parallel ranks (dp_reshardable); "+
				"save the checkpoint with --dist-ckpt-optim-fully-reshardable", filepath.Join(m.dir, metadataFile))
		}
	}
	for _, key := range slices.Sorted(maps.Keys(m.used)) {
		for _, kind := range []foreign.Kind{foreign.ExpAvg, foreign.ExpAvgSq} {
			name := "optimizer.state." + stateNames[kind][0] + "." + key
			if m.tensors[name] == nil {
				return fmt.Errorf("%s has no tensor %s; only the state of Adam is supported",
					filepath.Join(m.dir, metadataFile), name)
			}
		}
	}
	return nil
}
