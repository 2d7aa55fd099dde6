// Package deepspeed reads the checkpoints of DeepSpeed: ZeRO of stages 1, 2 and 3, and universal
// checkpoints. It writes universal checkpoints.
//
// The forms are defined by deepspeed/runtime/engine.py, deepspeed/runtime/zero/stage_1_and_2.py,
// stage3.py, and deepspeed/utils/zero_to_fp32.py of DeepSpeed 0.19.8.
package deepspeed

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"mula/internal/pickle"
	"mula/moe/torchfile"
	"mula/train/foreign"
)

// allowed has the classes of DeepSpeed in its checkpoints that are plain data.
var allowed = map[pickle.Global]bool{
	"deepspeed.runtime.fp16.loss_scaler.LossScaler":           true,
	"deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler":    true,
	"deepspeed.utils.tensor_fragment.fragment_address":        true,
	"deepspeed.runtime.zero.config.ZeroStageEnum":             true,
	"deepspeed.checkpoint.universal_checkpoint.SubparamShape": true,
}

// latestFile has the name of the newest checkpoint in a folder of checkpoints.
const latestFile = "latest"

// Find returns the directory of the checkpoint at dir, which is a checkpoint, or a folder of
// checkpoints with a file "latest". ok is false without a checkpoint.
func Find(dir string) (found string, ok bool) {
	for _, name := range []string{latestFile, "latest_universal"} {
		if text, err := os.ReadFile(filepath.Join(dir, name)); err == nil && len(text) < 1<<10 {
			name := strings.TrimSpace(string(text))
			if name != "" && filepath.Base(name) == name && name != ".." {
				dir = filepath.Join(dir, name)
				break
			}
		}
	}
	names, err := filepath.Glob(filepath.Join(escaped(dir), "*_model_states.pt"))
	return dir, err == nil && len(names) > 0
}

// escaped returns a path as a pattern that matches only the path.
func escaped(path string) string {
	return regexp.MustCompile(`[*?\[\\]`).ReplaceAllString(path, `\$0`)
}

// Open reads the checkpoint in a directory that [Find] has found.
func Open(dir string) (*foreign.State, error) {
	s, err := checkpoint{dir}.open()
	if err != nil {
		return nil, err
	}
	s.Dir = dir
	return s, nil
}

// A checkpoint is the directory of a checkpoint.
type checkpoint struct{ dir string }

func (c checkpoint) read(name string) (*torchfile.File, error) {
	return torchfile.Open(filepath.Join(c.dir, name), func(g pickle.Global) bool { return allowed[g] })
}

// A dict is a dict of a file, with the path of its name in errors.
type dict struct {
	*pickle.Dict
	path string
}

func (d dict) wrong(key, want string) error {
	return fmt.Errorf("%s: %q is missing or not %s", d.path, key, want)
}

func (d dict) dict(key string) (dict, error) {
	v, _ := d.Get(key)
	inner, ok := v.(*pickle.Dict)
	if !ok {
		return dict{}, d.wrong(key, "a dict")
	}
	return dict{inner, d.path + ": " + key}, nil
}

func (d dict) list(key string) ([]pickle.Value, error) {
	v, _ := d.Get(key)
	list, ok := v.(*pickle.List)
	if !ok {
		return nil, d.wrong(key, "a list")
	}
	return list.Items, nil
}

func (d dict) int(key string) (int64, error) {
	v, _ := d.Get(key)
	n, ok := v.(int64)
	if !ok {
		return 0, d.wrong(key, "an integer")
	}
	return n, nil
}

func (c checkpoint) root(name string) (dict, error) {
	f, err := c.read(name)
	if err != nil {
		return dict{}, err
	}
	root, ok := f.Root.(*pickle.Dict)
	if !ok {
		return dict{}, fmt.Errorf("%s: not a dict", filepath.Join(c.dir, name))
	}
	return dict{root, filepath.Join(c.dir, name)}, nil
}

// optimizerName matches the files of the ranks' optimizer states.
var optimizerName = regexp.MustCompile(`^(bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt$`)

func (c checkpoint) open() (*foreign.State, error) {
	entries, err := os.ReadDir(c.dir)
	if err != nil {
		return nil, err
	}
	var ranks []string // optimizer files by rank
	model := ""
	for _, e := range entries {
		name := e.Name()
		if m := optimizerName.FindStringSubmatch(name); m != nil {
			rank, err := strconv.Atoi(m[2])
			if err != nil || rank > 1<<20 {
				return nil, fmt.Errorf("%s: invalid rank", filepath.Join(c.dir, name))
			}
			if m[3] != "00" {
				return nil, fmt.Errorf("%s: a checkpoint of tensor-parallel ranks is not supported; convert it with "+
					"ds_to_universal.py of DeepSpeed", filepath.Join(c.dir, name))
			}
			for len(ranks) <= rank {
				ranks = append(ranks, "")
			}
			ranks[rank] = name
		}
		if strings.HasPrefix(name, "expp_rank_") || strings.HasPrefix(name, "layer_") {
			return nil, fmt.Errorf("%s: a checkpoint of DeepSpeed's expert or pipeline parallelism is not supported; "+
				"only models that each rank holds or partitions as a whole are", filepath.Join(c.dir, name))
		}
		if name == "mp_rank_00_model_states.pt" || name == "zero_pp_rank_0_mp_rank_00_model_states.pt" {
			model = name
		}
	}
	if model == "" {
		return nil, fmt.Errorf("%s has no mp_rank_00_model_states.pt", c.dir)
	}
	root, err := c.root(model)
	if err != nil {
		return nil, err
	}
	s := &foreign.State{Samples: -1}
	if s.Step, err = root.int("global_steps"); err != nil {
		return nil, err
	}
	if n, err := root.int("global_samples"); err == nil {
		s.Samples = n
	}
	if s.Step < 0 || s.Samples < -1 {
		return nil, fmt.Errorf("%s: a negative number of steps or samples", root.path)
	}
	if info, err := os.Stat(filepath.Join(c.dir, "zero")); err == nil && info.IsDir() {
		return s, c.universal(s)
	}
	if len(ranks) == 0 {
		return nil, fmt.Errorf("%s has no *_optim_states.pt; only checkpoints of ZeRO and universal checkpoints are "+
			"supported", c.dir)
	}
	if i := slices.Index(ranks, ""); i >= 0 {
		return nil, fmt.Errorf("%s has no *_optim_states.pt of rank %d; copy the files of all ranks", c.dir, i)
	}
	return s, c.zero(s, root, ranks)
}

// A group is the parameters whose values are in one vector, which is divided among ranks.
type group struct {
	// vectors of all ranks, by kind
	vectors [3][]*torchfile.Tensor
	each    int64 // elements of a rank
}

// read reads elements of the vector of all ranks.
func (g *group) read(kind foreign.Kind, dst []float32, first int64) error {
	for len(dst) > 0 {
		rank, at := first/g.each, first%g.each
		n := min(int64(len(dst)), g.each-at)
		if err := g.vectors[kind][rank].Float32(dst[:n], at); err != nil {
			return err
		}
		dst, first = dst[n:], first+n
	}
	return nil
}

// zero reads a checkpoint of ZeRO.
func (c checkpoint) zero(s *foreign.State, model dict, ranks []string) error {
	shapes, err := parameterShapes(model)
	if err != nil {
		return err
	}
	var stage int64
	var groups []group
	var paddings []pickle.Value
	for rank, name := range ranks {
		root, err := c.root(name)
		if err != nil {
			return err
		}
		o, err := root.dict("optimizer_state_dict")
		if err != nil {
			return err
		}
		own, err := stageOf(o)
		if err != nil {
			return err
		}
		if rank == 0 {
			stage = own
		}
		if own != stage {
			return fmt.Errorf("%s: stage %d of ZeRO, but rank 0 has stage %d; remove the files of another run",
				root.path, own, stage)
		}
		weights, base := "single_partition_of_fp32_groups", "base_optimizer_state"
		if stage == 3 {
			weights, base = "fp32_flat_groups", "optimizer_state_dict"
		}
		if err := c.partitions(o, len(ranks)); err != nil {
			return err
		}
		flat, err := o.list(weights)
		if err != nil {
			return err
		}
		adam, err := o.dict(base)
		if err != nil {
			return err
		}
		if rank == 0 {
			groups = make([]group, len(flat))
			if v, ok := o.Get("param_alignment_paddings"); ok && stage < 3 {
				if list, ok := v.(*pickle.List); ok {
					paddings = list.Items
				}
			}
			s.Settings = settings(adam)
		}
		if len(flat) != len(groups) {
			return fmt.Errorf("%s: %d groups, but rank 0 has %d", root.path, len(flat), len(groups))
		}
		for i := range flat {
			updates, err := groups[i].add(adam, flat[i], i)
			if err == nil && (rank > 0 || i > 0) && updates != s.Updates {
				err = fmt.Errorf("%s: %d updates of group %d, but %d of group 0 of rank 0", root.path, updates, i,
					s.Updates)
			}
			if err != nil {
				return err
			}
			s.Updates = updates
		}
	}
	s.Form = fmt.Sprintf("DeepSpeed ZeRO stage %d, %d ranks", stage, len(ranks))
	if stage == 3 {
		return s3(s, shapes, groups, len(ranks), c.dir)
	}
	return s12(s, shapes, groups, paddings, c.dir)
}

// partitions checks the number of ranks that have written the checkpoint.
func (c checkpoint) partitions(o dict, ranks int) error {
	v, _ := o.Get("partition_count")
	counts := []pickle.Value{v}
	if list, ok := v.(*pickle.List); ok {
		counts = list.Items
	}
	for _, n := range counts {
		if n != int64(ranks) {
			return fmt.Errorf("%s: the parameters are divided among %v ranks, but %s has files of %d; copy the files "+
				"of all ranks (experts that are divided among fewer ranks are not supported)", o.path, n, c.dir, ranks)
		}
	}
	return nil
}

// stageOf returns the stage of ZeRO.
func stageOf(o dict) (int64, error) {
	v, _ := o.Get("zero_stage")
	if e, ok := v.(*pickle.Object); ok && len(e.Args) == 1 { // an enum
		v = e.Args[0]
	}
	if n, ok := v.(int64); ok && n >= 1 && n <= 3 {
		return n, nil
	}
	return 0, o.wrong("zero_stage", "1, 2 or 3")
}

// add adds the vectors of the next rank, of group number i, and returns the optimizer's number of
// updates.
func (g *group) add(adam dict, weights pickle.Value, i int) (updates int64, err error) {
	states, err := adam.dict("state")
	if err != nil {
		return 0, err
	}
	var own dict
	for _, pair := range states.Pairs {
		if pair.Key == int64(i) {
			own.Dict, _ = pair.Value.(*pickle.Dict)
			own.path = fmt.Sprintf("%s: %d", states.path, i)
		}
	}
	if own.Dict == nil {
		return 0, fmt.Errorf("%s: group %d has no state; only the state of Adam and AdamW is supported", states.path, i)
	}
	first, _ := own.Get("exp_avg")
	second, _ := own.Get("exp_avg_sq")
	for kind, v := range []pickle.Value{weights, first, second} {
		t, ok := v.(*torchfile.Tensor)
		if !ok {
			return 0, fmt.Errorf("%s: fp32 weights, exp_avg or exp_avg_sq is missing; only the state of Adam and "+
				"AdamW is supported", own.path)
		}
		if kind == 0 && len(g.vectors[0]) == 0 {
			g.each = t.Elements()
		}
		if t.Elements() != g.each || g.each == 0 {
			return 0, fmt.Errorf("%s: a vector of %d elements; %d are expected", own.path, t.Elements(), g.each)
		}
		g.vectors[kind] = append(g.vectors[kind], t)
	}
	step, ok := own.Get("step")
	if !ok { // in the group of parameters
		list, err := adam.list("param_groups")
		if err != nil {
			return 0, err
		}
		if i < len(list) {
			if d, ok := list[i].(*pickle.Dict); ok {
				step, _ = d.Get("step")
			}
		}
	}
	return count(step, own.path)
}

// count returns the value of a number of updates.
func count(v pickle.Value, path string) (int64, error) {
	n, err := foreign.Count(v)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return n, nil
}

// A shape is the shape of a parameter.
type shape struct {
	name string
	dims []int
}

func (s shape) elements() int64 {
	n := int64(1)
	for _, d := range s.dims {
		n *= int64(d)
	}
	return n
}

// parameterShapes returns the parameters of all groups, in their order in the vectors.
func parameterShapes(model dict) (groups [][]shape, err error) {
	if v, _ := model.Get("frozen_param_shapes"); v != nil {
		if d, ok := v.(*pickle.Dict); !ok || len(d.Pairs) > 0 {
			return nil, fmt.Errorf("%s: frozen parameters are not supported", model.path)
		}
	}
	list, err := model.list("param_shapes")
	if err != nil {
		return nil, err
	}
	for _, item := range list {
		d, ok := item.(*pickle.Dict)
		if !ok {
			return nil, model.wrong("param_shapes", "a list of dicts")
		}
		var group []shape
		for _, pair := range d.Pairs {
			name, isText := pair.Key.(string)
			dims, isShape := torchfile.Ints(pair.Value)
			if !isText || !isShape {
				return nil, model.wrong("param_shapes", "a list of dicts of shapes")
			}
			n := int64(1)
			for _, d := range dims {
				if d < 0 || d > 1<<31 || n > 1<<44 {
					return nil, fmt.Errorf("%s: %s has shape %v", model.path, name, dims)
				}
				n *= int64(d)
			}
			group = append(group, shape{strings.TrimPrefix(name, "module."), dims})
		}
		groups = append(groups, group)
	}
	return groups, nil
}

// s12 finds the parameters of stages 1 and 2. The parameters of a group follow each other in its
// vector, perhaps with padding after each, and the vector is divided evenly among ranks.
func s12(s *foreign.State, shapes [][]shape, groups []group, paddings []pickle.Value, dir string) error {
	if len(shapes) != len(groups) {
		return fmt.Errorf("%s: param_shapes has %d groups, but the optimizer has %d", dir, len(shapes), len(groups))
	}
	for i, list := range shapes {
		g, at := &groups[i], int64(0)
		var padding []int
		if len(paddings) > 0 {
			var ok bool
			if i < len(paddings) {
				padding, ok = torchfile.Ints(paddings[i])
			}
			if !ok || len(padding) != len(list) || slices.ContainsFunc(padding, func(n int) bool { return n < 0 }) {
				return fmt.Errorf("%s: param_alignment_paddings does not belong to param_shapes", dir)
			}
		}
		for j, p := range list {
			first := at
			at += p.elements()
			if total := g.each * int64(len(g.vectors[0])); at > total {
				return fmt.Errorf("%s: group %d has %d elements, too few for %s", dir, i, total, p.name)
			}
			s.Parameters = append(s.Parameters, foreign.Parameter{Name: p.name, Shape: p.dims,
				Read: func(kind foreign.Kind, dst []float32, from int64) error {
					return g.read(kind, dst, first+from)
				}})
			if padding != nil {
				at += int64(padding[j])
			}
		}
	}
	return nil
}

// s3 finds the parameters of stage 3. Each parameter is divided evenly among ranks, with padding at
// its end. The parts of a rank follow each other in the vectors of its groups.
func s3(s *foreign.State, shapes [][]shape, groups []group, ranks int, dir string) error {
	ends := make([]int64, len(groups)) // of the groups' vectors of a rank
	total := int64(0)
	for i, g := range groups {
		total += g.each
		ends[i] = total
	}
	at := int64(0)
	for _, list := range shapes {
		for _, p := range list {
			part := (p.elements() + int64(ranks) - 1) / int64(ranks)
			first := at
			if at += part; at > total {
				return fmt.Errorf("%s: a rank has %d elements, too few for %s", dir, total, p.name)
			}
			s.Parameters = append(s.Parameters, foreign.Parameter{Name: p.name, Shape: p.dims,
				Read: func(kind foreign.Kind, dst []float32, from int64) error {
					for len(dst) > 0 {
						rank, local := from/part, first+from%part
						i, _ := slices.BinarySearch(ends, local+1)
						g := groups[i]
						n := min(int64(len(dst)), part-from%part, ends[i]-local)
						if err := g.vectors[kind][rank].Float32(dst[:n], local-(ends[i]-g.each)); err != nil {
							return err
						}
						dst, from = dst[n:], from+n
					}
					return nil
				}})
		}
	}
	return nil
}

// settings describes the optimizer's settings.
func settings(adam dict) string {
	list, err := adam.list("param_groups")
	if err != nil {
		return ""
	}
	return foreign.Settings(list, "betas", "eps", "weight_decay", "lr")
}

// universal reads a universal checkpoint: a folder for each parameter.
func (c checkpoint) universal(s *foreign.State) error {
	dir := filepath.Join(c.dir, "zero")
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	s.Form = "DeepSpeed universal checkpoint"
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		if _, err := os.Stat(filepath.Join(dir, e.Name(), "fp32.pt")); errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var tensors [3]*torchfile.Tensor
		for kind, file := range []string{"fp32.pt", "exp_avg.pt", "exp_avg_sq.pt"} {
			name := filepath.Join("zero", e.Name(), file)
			f, err := c.read(name)
			if err != nil {
				return err
			}
			t, ok := f.Root.(*torchfile.Tensor)
			if d, isDict := f.Root.(*pickle.Dict); isDict {
				v, _ := d.Get("param")
				t, ok = v.(*torchfile.Tensor)
				if _, sliced := d.Get("ep_num_experts"); sliced {
					return fmt.Errorf("%s: DeepSpeed's experts are not supported", filepath.Join(c.dir, name))
				}
			}
			if !ok {
				return fmt.Errorf("%s: param is missing or not a tensor", filepath.Join(c.dir, name))
			}
			if tensors[kind] = t; !slices.Equal(t.Shape, tensors[0].Shape) {
				return fmt.Errorf("%s: shape %v, but fp32.pt has %v", filepath.Join(c.dir, name), t.Shape,
					tensors[0].Shape)
			}
		}
		updates := s.Step
		name := filepath.Join("zero", e.Name(), "step.pt")
		if f, err := c.read(name); err == nil {
			if updates, err = count(f.Root, filepath.Join(c.dir, name)); err != nil {
				return err
			}
		} else if !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if len(s.Parameters) > 0 && updates != s.Updates {
			return fmt.Errorf("%s: %d updates, but other parameters have %d", filepath.Join(c.dir, name), updates,
				s.Updates)
		}
		s.Updates = updates
		s.Parameters = append(s.Parameters, foreign.Parameter{Name: strings.TrimPrefix(e.Name(), "module."),
			Shape: tensors[0].Shape,
			Read: func(kind foreign.Kind, dst []float32, first int64) error {
				return tensors[kind].Float32(dst, first)
			}})
	}
	return nil
}
