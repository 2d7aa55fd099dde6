package moe

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"mula/internal/filesystem"
	"mula/internal/objects"
	"mula/moe/safetensors"
	"mula/xpu"
)

// A Stored is a model stored in a Hugging Face directory whose tensors match its config.json. It is
// read in chunks, so that checking and converting a model takes only a few megabytes of memory.
type Stored struct {
	dir     string
	config  Config
	files   TensorReader
	tensors []safetensors.Tensor // from Config.Tensors
	sources []source             // of each tensor
	types   []safetensors.DType
	bytes   byteReader // files, if it reads tensors of bytes; otherwise nil
	fused   bool
	mxfp4   bool // experts are in MXFP4; see mxfp4.go
	head    bool // the head is tied, but stored too

	predictions      []predicted // tensors of layers of multi-token prediction; see predictions.go
	predictionLayers int
}

// A TensorReader reads the tensors of a stored model: a [safetensors.Directory], or the checkpoint
// of another framework under Hugging Face's names.
type TensorReader interface {
	Tensors() []safetensors.Tensor
	Float32(dst []float32, name string, first int64) error // reads elements from element first on
	Close() error
}

// A source is the location of a model tensor: it starts at element first of a stored tensor.
type source struct {
	tensor string
	first  int64
	placing
	mxfp4 bool
}

// OpenStored opens the model of a Hugging Face directory and compares its tensor names and shapes
// with config.json; it accepts what [Model.Load] accepts. The error lists every tensor that is
// missing, wrong or unknown. dir is a directory of fsys, or its URL.
func OpenStored(fsys filesystem.FS, dir string) (*Stored, error) { return OpenStoredWith(fsys, dir, 0) }

// OpenStoredWith is [OpenStored] of a model with the given [Config.PredictionLayers]: the first of
// the layers of multi-token prediction in the files are part of the model.
func OpenStoredWith(fsys filesystem.FS, dir string, predictionLayers int) (*Stored, error) {
	c, err := ReadConfig(fsys, dir)
	if err != nil {
		return nil, err
	}
	if c.PredictionLayers = predictionLayers; predictionLayers != 0 {
		if err := c.Validate(); err != nil {
			return nil, fmt.Errorf("%s: %w", objects.Join(dir, configName), err)
		}
	}
	return openStored(fsys, dir, c)
}

// ReadConfig reads the config.json of a Hugging Face directory like [readConfigJSON]. dir is as in
// [OpenStored].
func ReadConfig(fsys filesystem.FS, dir string) (Config, error) {
	path := objects.Join(dir, configName)
	f, err := filesystem.Open(fsys, path)
	if err != nil {
		return Config{}, err
	}
	defer f.Close()
	return readConfigJSON(f, path)
}

// openStored opens the weights of a model of configuration c.
func openStored(fsys filesystem.FS, dir string, c Config) (*Stored, error) {
	files, err := safetensors.OpenDirectory(fsys, dir)
	if err != nil {
		if _, other := fsys.Stat(objects.Join(dir, "pytorch_model.bin")); other == nil {
			err = fmt.Errorf("%w, but pytorch_model.bin, which is not read: load the model with transformers and "+
				"save it again", err)
		}
		return nil, fmt.Errorf("loading weights: %w", err)
	}
	return NewStored(dir, c, files)
}

// NewStored returns the stored model of configuration c whose tensors files reads. dir is its name
// in errors. The error lists every tensor that is missing, wrong or unknown. Closing the model
// closes files, and so does an error.
func NewStored(dir string, c Config, files TensorReader) (*Stored, error) {
	s := &Stored{dir: dir, config: c, files: files}
	s.bytes, _ = files.(byteReader)
	if err := s.match(); err != nil {
		files.Close()
		return nil, err
	}
	return s, nil
}

// match finds every tensor of the model in the files, or returns an error that lists the problems.
func (s *Stored) match() error {
	stored := s.files.Tensors()
	// Do not allocate memory just because config.json asks for it.
	elements := int64(0)
	for _, t := range stored {
		elements += t.Elements()
		if t.DType == safetensors.U8 { // each has two weights; see mxfp4.go
			elements += t.Elements()
		}
	}
	const most = 1 << 12 // up to this many tensors are listed without this check
	if n := s.config.TotalParameters(); elements < n && int64(s.config.Layers)*int64(1+s.config.Experts) > most {
		return fmt.Errorf("%s describes a model of %d weights, but the weight files have %d; complete them, or "+
			"use the config.json that belongs to them",
			objects.Join(s.dir, configName), n, elements)
	}
	s.tensors = s.config.Tensors()
	s.sources = make([]source, len(s.tensors))
	number := make(map[string]int, len(s.tensors))
	for i, t := range s.tensors {
		number[t.Name] = i
	}
	bias := s.config.family().router.biasName()
	inMemory := strings.NewReplacer(".mlp.gate."+strings.TrimPrefix(bias, "."), ".mlp"+bias)
	var unexpected []string
	packed := map[string]bool{} // the tensors in MXFP4
	stored, wrong, missing := s.matchPredictions(stored)
	for _, t := range stored {
		fused, want := s.config.unfuse(t)
		if want == nil && s.bytes != nil {
			if fused, want = s.config.unfuseMXFP4(t); want != nil {
				packed[t.Name] = true
			}
		}
		mxfp4, dtype := packed[t.Name], t.DType
		if mxfp4 {
			s.mxfp4, dtype = true, safetensors.BF16
		}
		if !slices.Contains(s.types, dtype) && !s.config.alwaysFloat32(t.Name) {
			s.types = append(s.types, dtype)
		}
		// transformers 5 holds the router of most families as mlp.gate, with its correction biases
		pieces := []piece{{name: s.config.routerName(inMemory.Replace(t.Name)), shape: t.Shape}}
		if want != nil {
			s.fused = true
			problem := ""
			switch {
			case !slices.Equal(t.Shape, want):
				problem = fmt.Sprintf("%s (shape %v, want %v)", t.Name, t.Shape, want)
			case mxfp4 && t.DType != safetensors.U8:
				problem = fmt.Sprintf("%s (elements of type %s; MXFP4 has U8)", t.Name, t.DType)
			}
			if problem != "" {
				wrong = append(wrong, problem)
				for _, piece := range fused { // they are not missing
					if i, known := number[piece.name]; known && s.sources[i].tensor == "" {
						s.sources[i].tensor = t.Name
					}
				}
				continue
			}
			pieces = fused
		}
		if s.config.TieEmbeddings && t.Name == headName && slices.Equal(t.Shape, s.tensors[0].Shape) {
			s.head = true
			continue
		}
		for _, piece := range pieces {
			i, known := number[piece.name]
			switch {
			case !known:
				unexpected = append(unexpected, t.Name)
			case s.sources[i].tensor != "":
				wrong = append(wrong, fmt.Sprintf("%s (stored in %s and in %s)", piece.name, s.sources[i].tensor,
					t.Name))
			case !slices.Equal(piece.shape, s.tensors[i].Shape):
				wrong = append(wrong, fmt.Sprintf("%s (shape %v, want %v)", t.Name, piece.shape, s.tensors[i].Shape))
				s.sources[i].tensor = t.Name // it is not missing
			case !mxfp4 && t.DType != safetensors.F32 && t.DType != safetensors.F16 && t.DType != safetensors.BF16:
				wrong = append(wrong, fmt.Sprintf("%s (elements of type %s; only F32, F16 and BF16 are "+
					"supported)", t.Name,
					t.DType))
				s.sources[i].tensor = t.Name
			default:
				s.sources[i] = source{t.Name, piece.first, piece.placing, mxfp4}
			}
		}
	}
	slices.Sort(s.types)
	missing = append(missing, lackingMXFP4(packed)...)
	for i, t := range s.tensors {
		if s.sources[i].tensor == "" {
			missing = append(missing, t.Name)
		}
	}
	if len(unexpected)+len(wrong)+len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("loading weights from %s: %w", s.dir, errors.Join(
		some("tensors that do not fit the configuration", wrong), some("tensors missing",
			missing), some("tensors unexpected", unexpected)))
}

// some returns an error that lists the first few names, or nil if there are none.
func some(what string, names []string) error {
	const most = 5
	switch {
	case len(names) == 0:
		return nil
	case len(names) > most:
		return fmt.Errorf("%s: %s and %d more", what, strings.Join(names[:most], ", "), len(names)-most)
	}
	return fmt.Errorf("%s: %s", what, strings.Join(names, ", "))
}

// A piece is the range of a stored tensor, from element first, that holds one parameter.
type piece struct {
	name  string
	shape []int
	first int64
	placing
}

// fusedNames are names of tensors after the prefix of a layer: the router's weights [E, H], and all
// experts' gate and up projections [E, 2I, H], gate first, and down projections [E, H, I].
type fusedNames struct{ router, gateUp, down string }

// memoryNames are the names in the memory of transformers 5, for most families.
var memoryNames = fusedNames{"mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}

// fusedNames returns the names in files, unless they are zero, and in the memory of transformers 5.
func (f *family) fusedNames() (all []fusedNames) {
	if f.files != (fusedNames{}) {
		all = append(all, f.files)
	}
	return append(all, cmp.Or(f.memory, memoryNames))
}

// routerName returns the name in [Config.Tensors] of the weights of a router, given another name of
// them. It returns other names unchanged.
func (c Config) routerName(name string) string {
	f := c.family()
	for _, names := range f.fusedNames() {
		if prefix, ok := strings.CutSuffix(name, "."+names.router); ok && c.moe() {
			return prefix + "." + f.blockNames().block + "." + f.blockNames().router + ".weight"
		}
	}
	return name
}

// unfuse divides a tensor of fused experts into its parameters and returns its expected shape; for
// any other tensor want is nil.
func (c Config) unfuse(t safetensors.Tensor) (pieces []piece, want []int) {
	if !c.moe() {
		return nil, nil
	}
	h, ffn, e := c.HiddenSize, c.IntermediateSize, c.Experts
	matrix := int64(ffn) * int64(h)
	if c.family().transposed {
		layer, last, _ := strings.Cut(t.Name, "mlp.experts.")
		return c.unfuseTransposed(layer, last)
	}
	block := c.family().blockNames()
	for _, names := range c.family().fusedNames() {
		if prefix, ok := strings.CutSuffix(t.Name, names.gateUp); ok {
			for i := range e {
				gate, up, _ := block.network(block.expert(prefix, i))
				first := 2 * matrix * int64(i)
				pieces = append(pieces, piece{name: gate, shape: []int{ffn, h}, first: first},
					piece{name: up, shape: []int{ffn, h}, first: first + matrix})
			}
			return pieces, []int{e, 2 * ffn, h}
		}
		if prefix, ok := strings.CutSuffix(t.Name, names.down); ok {
			for i := range e {
				_, _, down := block.network(block.expert(prefix, i))
				pieces = append(pieces, piece{name: down, shape: []int{h, ffn}, first: matrix * int64(i)})
			}
			return pieces, []int{e, h, ffn}
		}
	}
	return nil, nil
}

// Config returns the configuration in config.json.
func (s *Stored) Config() Config { return s.config }

// Types lists the distinct element types of the weights, without the tensors that files of every
// type have as float32; see [Config.StoredTensors]. Experts in MXFP4 count as BF16.
func (s *Stored) Types() []safetensors.DType { return s.types }

// Fused reports whether the experts of a layer are stored as one tensor.
func (s *Stored) Fused() bool { return s.fused }

// MXFP4 reports whether the experts are stored in MXFP4.
func (s *Stored) MXFP4() bool { return s.mxfp4 }

// Close closes the files.
func (s *Stored) Close() error { return s.files.Close() }

// pieceElements is the size of a chunk, in elements, when a stored model is read.
const pieceElements = 1 << 18

// each reads the i-th tensor and passes it to visit in chunks of the size of buffer.
func (s *Stored) each(i int, buffer []float32, visit func([]float32) error) error {
	t, from := s.tensors[i], s.sources[i]
	var head []float32
	if i == 0 && s.head {
		head = make([]float32, min(pieceElements, len(buffer)))
	}
	n := t.Elements()
	if from.mxfp4 {
		return s.eachMXFP4(t, from, buffer[:min(int64(len(buffer)), n)], visit)
	}
	if from.line > 0 {
		return s.eachPlaced(t, from, buffer, visit)
	}
	for done := int64(0); done < n; {
		piece := buffer[:min(int64(len(buffer)), n-done)]
		if err := s.files.Float32(piece, from.tensor, from.first+done); err != nil {
			return fmt.Errorf("loading weights: %w", err)
		}
		for first := 0; head != nil && first < len(piece); first += len(head) {
			copied := head[:min(len(head), len(piece)-first)]
			if err := s.files.Float32(copied, headName, done+int64(first)); err != nil {
				return fmt.Errorf("loading weights: %w", err)
			}
			if !slices.Equal(copied, piece[first:first+len(copied)]) {
				return fmt.Errorf("loading weights from %s: tie_word_embeddings is true, but %s differs from %s; "+
					"set it to false, or remove the head",
					s.dir, headName, embeddingName)
			}
		}
		if err := visit(piece); err != nil {
			return err
		}
		done += int64(len(piece))
	}
	return nil
}

// Each reads all weights, tensor by tensor in the order of [Model.Parameters], and passes them to
// visit as float32, in chunks. A chunk is valid until visit returns.
func (s *Stored) Each(ctx context.Context, visit func(tensor string, piece []float32) error) error {
	buffer := make([]float32, pieceElements)
	for i, t := range s.tensors {
		if err := s.each(i, buffer, func(piece []float32) error {
			return errors.Join(ctx.Err(),
				visit(t.Name, piece))
		}); err != nil {
			return err
		}
	}
	return nil
}

// Tensor reads tensor i of [Config.Tensors] and passes it to visit as float32, in chunks. A chunk
// is valid until visit returns.
func (s *Stored) Tensor(ctx context.Context, i int, visit func([]float32) error) error {
	return s.each(i, make([]float32, min(pieceElements, s.tensors[i].Elements())), func(piece []float32) error {
		return errors.Join(ctx.Err(), visit(piece))
	})
}

// Model creates a model with the stored weights on a device.
func (s *Stored) Model(dev xpu.Device) (*Model, error) {
	m, err := New(s.config, dev)
	if err != nil {
		return nil, err
	}
	if err := m.read(s); err != nil {
		m.Close()
		return nil, err
	}
	return m, nil
}

// Save writes the model to dir like [Model.Save], with its layers of multi-token prediction. It
// passes every chunk of the model's weights that it reads to visit, tensor by tensor in the order
// of the files. It does not pass these layers.
func (s *Stored) Save(ctx context.Context, dir string, opts SaveOptions,
	visit func(tensor string, piece []float32) error) error {
	buffer := make([]float32, pieceElements)
	return saveDirectory(dir, s.config, opts, func(i int, write func([]float32) error) error {
		return s.each(i, buffer, func(piece []float32) error {
			if err := errors.Join(ctx.Err(), visit(s.tensors[i].Name, piece)); err != nil {
				return err
			}
			return write(piece)
		})
	}, s.savedPredictions(ctx, opts.dtype(), buffer))
}

// A FusedTensor is a tensor of the model in transformers: the given tensors of [Config.Tensors],
// one after another.
type FusedTensor struct {
	Name  string
	Shape []int
	Parts []int // numbers of the tensors

	pieces []piece // the places of the parts, if they do not follow one another
}

// Fused returns the tensors of the model in the memory of transformers 5. A layer's experts have
// two tensors: gate and up of one expert after another, and down. The router of most families is
// mlp.gate. Other tensors are as in [Config.Tensors].
func (c Config) Fused() []FusedTensor { return c.fuse(cmp.Or(c.family().memory, memoryNames)) }

// inFiles returns the tensors of the model in the files of transformers.
func (c Config) inFiles() []FusedTensor {
	if c.family().transposed {
		return c.transposedFiles()
	}
	if names := c.family().files; names != (fusedNames{}) {
		return c.fuse(names)
	}
	var list []FusedTensor
	for i, t := range c.Tensors() {
		list = append(list, FusedTensor{Name: t.Name, Shape: t.Shape, Parts: []int{i}})
	}
	return list
}

// fuse returns the tensors of the model with fused experts of the given names.
func (c Config) fuse(names fusedNames) []FusedTensor {
	tensors := c.Tensors()
	number := make(map[string]int, len(tensors))
	for i, t := range tensors {
		number[t.Name] = i
	}
	block := c.family().blockNames()
	router := block.block + "." + block.router + ".weight"
	whole := map[int]FusedTensor{} // of the first part
	inside := map[int]bool{}       // other parts
	for l := range c.Layers {
		for _, name := range []string{names.gateUp, names.down} {
			f := FusedTensor{Name: layerPrefix(l) + name}
			pieces, shape := c.unfuse(safetensors.Tensor{Name: f.Name})
			if shape == nil || !c.HasExperts(l) {
				continue
			}
			f.Shape = shape
			for _, p := range pieces {
				f.Parts = append(f.Parts, number[p.name])
				inside[number[p.name]] = true
			}
			whole[f.Parts[0]] = f
		}
	}
	var list []FusedTensor
	for i, t := range tensors {
		if f, ok := whole[i]; ok {
			list = append(list, f)
		} else if !inside[i] {
			if layer, ok := strings.CutSuffix(t.Name, router); ok && c.moe() {
				t.Name = layer + names.router
			}
			list = append(list, FusedTensor{Name: t.Name, Shape: t.Shape, Parts: []int{i}})
		}
	}
	return list
}
