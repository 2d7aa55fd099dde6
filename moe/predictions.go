package moe

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"mula/moe/safetensors"
)

// Layers of multi-token prediction (https://arxiv.org/abs/2412.19437, section 2.2) in files;
// predict.go trains them. Layer k, from 0, has the number L+k after the L layers of the model, and
// the tensors of a layer and predictionTensors. The first [Config.PredictionLayers] of them are
// part of the model. A [Stored] keeps the tensors of the others for a copy of the model.
//
// Files of DeepSeek-V3 repeat the embedding and the head in each of these layers. A family with
// names of its own has a prefix of all of them.

// predicted is a tensor of layers of multi-token prediction.
type predicted struct {
	safetensors.Tensor        // as stored
	sameAs             string // the tensor of the model that it repeats; "": none
}

// PredictionLayers returns the number of layers of multi-token prediction in the files.
func (s *Stored) PredictionLayers() int { return s.predictionLayers }

// predictionTensors returns the tensors that layer k of multi-token prediction must have, and the
// tensors that it may repeat.
func (c Config) predictionTensors(k int) (own, repeated []predicted) {
	number, h := c.Layers+k, c.HiddenSize
	var list tensorList
	list.layer(c, number)
	list.prediction(c, number)
	for _, t := range list {
		own = append(own, predicted{Tensor: t})
	}
	named := func(name, sameAs string, shape ...int) predicted {
		t := safetensors.Tensor{Name: layerPrefix(number) + name, DType: safetensors.F32, Shape: shape}
		return predicted{t, sameAs}
	}
	head := headName
	if c.TieEmbeddings {
		head = embeddingName
	}
	return own, []predicted{named("embed_tokens.weight", embeddingName, c.VocabSize, h),
		named("shared_head.head.weight", head, c.VocabSize, h)}
}

// prediction adds the tensors that layer number, of multi-token prediction, has besides the tensors
// of a layer: norms of the embedding and of the hidden state, their projection, and the norm before
// the head.
func (list *tensorList) prediction(c Config, number int) {
	prefix, h := layerPrefix(number), c.HiddenSize
	list.add(prefix+"enorm.weight", h)
	list.add(prefix+"hnorm.weight", h)
	list.add(prefix+"eh_proj.weight", h, 2*h)
	list.add(prefix+"shared_head.norm.weight", h)
}

// matchPredictions finds the layers of multi-token prediction among the stored tensors. It returns
// the other tensors, and the problems, as in match. The tensors of layers that are part of the
// model are among the other tensors, except for the repeated ones.
func (s *Stored) matchPredictions(stored []safetensors.Tensor) (others []safetensors.Tensor, wrong,
	missing []string) {
	byName := make(map[string]safetensors.Tensor, len(stored))
	for _, t := range stored {
		byName[t.Name] = t
	}
	taken := map[string]bool{}
	take := func(want predicted, optional bool) {
		t, ok := byName[want.Name]
		switch {
		case !ok && optional:
			return
		case !ok:
			missing = append(missing, want.Name)
			return
		case len(want.Shape) > 0 && !slices.Equal(t.Shape, want.Shape):
			wrong = append(wrong, fmt.Sprintf("%s (shape %v, want %v)", t.Name, t.Shape, want.Shape))
		case t.DType != safetensors.F32 && t.DType != safetensors.F16 && t.DType != safetensors.BF16:
			wrong = append(wrong, fmt.Sprintf("%s (elements of type %s; only F32, F16 and BF16 are supported)", t.Name,
				t.DType))
		}
		taken[t.Name] = true
		s.predictions = append(s.predictions, predicted{t, want.sameAs})
		if !slices.Contains(s.types, t.DType) && !s.config.alwaysFloat32(t.Name) {
			s.types = append(s.types, t.DType)
		}
	}
	n, family := 0, s.config.family()
	has := func(name string) bool { _, ok := byName[name]; return ok }
	switch {
	case family.predictionTensors != "":
		for has(fmt.Sprintf("%slinear_proj.%d.weight", family.predictionTensors, n)) {
			n++
		}
		var names []string
		for name := range byName {
			if n > 0 && strings.HasPrefix(name, family.predictionTensors) {
				names = append(names, name)
			}
		}
		slices.Sort(names)
		for _, name := range names {
			take(predicted{Tensor: safetensors.Tensor{Name: name}}, false)
		}
	case family.predictionLayers != "":
		for ; has(layerPrefix(s.config.Layers+n) + "eh_proj.weight"); n++ {
			own, repeated := s.config.predictionTensors(n)
			if n < s.config.PredictionLayers {
				own = nil
			}
			for _, t := range own {
				take(t, false)
			}
			for _, t := range repeated {
				take(t, true)
			}
		}
	}
	s.predictionLayers = n
	for _, t := range stored {
		if !taken[t.Name] {
			others = append(others, t)
		}
	}
	return others, wrong, missing
}

// CheckPredictions reads the layers of multi-token prediction. Every weight must be finite, and a
// repeated tensor must equal the model's.
func (s *Stored) CheckPredictions(ctx context.Context) error {
	buffer := make([]float32, pieceElements)
	for i := range s.predictions {
		if err := s.eachPrediction(i, buffer, func([]float32) error { return ctx.Err() }); err != nil {
			return err
		}
	}
	return nil
}

// eachPrediction reads tensor i of the layers of multi-token prediction, checks it as in
// CheckPredictions, and passes it to visit in chunks of the size of buffer.
func (s *Stored) eachPrediction(i int, buffer []float32, visit func([]float32) error) error {
	t := s.predictions[i]
	var model []float32 // the same elements of the model
	if t.sameAs != "" {
		model = make([]float32, len(buffer))
	}
	for done, n := int64(0), t.Elements(); done < n; {
		piece := buffer[:min(int64(len(buffer)), n-done)]
		if err := s.files.Float32(piece, t.Name, done); err != nil {
			return fmt.Errorf("loading weights: %w", err)
		}
		if err := CheckFinite(s.dir, t.Name, done, piece); err != nil {
			return err
		}
		if t.sameAs != "" {
			named := func(m safetensors.Tensor) bool { return m.Name == t.sameAs }
			from, same := s.sources[slices.IndexFunc(s.tensors, named)], model[:len(piece)]
			if err := s.files.Float32(same, from.tensor, from.first+done); err != nil {
				return fmt.Errorf("loading weights: %w", err)
			}
			if !slices.Equal(same, piece) {
				return fmt.Errorf("loading weights from %s: %s differs from %s, but layers of multi-token prediction "+
					"share it with the model; remove %s", s.dir, t.Name, t.sameAs, t.Name)
			}
		}
		if err := visit(piece); err != nil {
			return err
		}
		done += int64(len(piece))
	}
	return nil
}

// savedPredictions are the layers of multi-token prediction in a directory that is written.
type savedPredictions struct {
	layers  int
	tensors []safetensors.Tensor
	fill    func(i int, write func([]float32) error) error // as in saveDirectory, of tensor i
}

// savedPredictions returns the layers of multi-token prediction for files of the given type.
func (s *Stored) savedPredictions(ctx context.Context, dtype safetensors.DType, buffer []float32) savedPredictions {
	p := savedPredictions{layers: s.predictionLayers}
	for _, t := range s.predictions {
		if t.DType = dtype; s.config.alwaysFloat32(t.Name) {
			t.DType = safetensors.F32
		}
		p.tensors = append(p.tensors, t.Tensor)
	}
	p.fill = func(i int, write func([]float32) error) error {
		return s.eachPrediction(i, buffer, func(piece []float32) error {
			if err := ctx.Err(); err != nil {
				return err
			}
			return write(piece)
		})
	}
	return p
}
