package report

import (
	"bufio"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// A simulation writes the metrics of a run that was never done: a loss that falls by a power law
// towards each source's own floor, noise that shrinks with the samples it is a mean of, and a
// router that settles.
type simulation struct {
	seed            uint64
	steps, planned  int
	sources         []string
	weights         []float64
	layers, experts int
	batch, length   int
	evalEvery       int
	resumes         []int
	spike           int // a step whose loss and gradient leap; 0: none
	empty           int // a step without samples, as a skip leaves it; 0: none
	skip, lost      int // steps skipped because of a spike, and because of values that are not finite; 0: none
	back            int // a step from which the data of five steps is skipped; 0: none
}

func quick() simulation {
	return simulation{
		seed: 1, steps: 400, planned: 400, sources: []string{"go", "tests", "assembly", "docs",
			"books"}, weights: []float64{0.45, 0.2, 0.1, 0.2, 0.05},
		layers: 4, experts: 16, batch: 32, length: 256, evalEvery: 50, resumes: []int{180}, spike: 260, empty: 310,
		skip: 215, lost: 218, back: 340,
	}
}

var epoch = time.Date(2026, 9, 1, 8, 0, 0, 0, time.UTC)

// write puts the metrics into a new directory of the given name, and returns it.
func (s simulation) write(t testing.TB, name string) string {
	t.Helper()
	dir := filepath.Join(t.TempDir(), name)
	if err := os.MkdirAll(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(dir, metricsFile))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	out := bufio.NewWriter(f)
	put := func(v any) {
		text, err := json.Marshal(v)
		if err != nil {
			t.Fatal(err)
		}
		out.Write(append(text, '\n'))
	}
	type object = map[string]any
	weights := object{}
	for i, name := range s.sources {
		weights[name] = s.weights[i]
	}
	put(object{"run": object{
		"format": 1, "mula": "v0.1.0", "parameters": 7_431_552, "active_parameters": 2_713_728,
		"model": object{
			"model_type": "olmoe", "num_hidden_layers": s.layers, "hidden_size": 128, "num_experts": s.experts,
			"num_experts_per_tok": 2,
			"vocab_size":          4096, "norm_topk_prob": false, "rms_norm_eps": 1e-5,
		},
		"plan": fmt.Sprintf("%x", sha256.Sum256([]byte{byte(s.seed)})), "sources": s.sources, "weights": weights,
		"sequence_length": s.length, "batch_size": s.batch, "steps": s.planned, "device": "cpu avx512, 2 threads",
		"started": epoch,
	}})
	rng := rand.New(rand.NewPCG(s.seed, 0))
	bias := make([][]float64, s.layers)
	for l := range bias {
		bias[l] = make([]float64, s.experts)
		for e := range bias[l] {
			bias[l][e] = rng.NormFloat64() * (0.6 + 0.8*float64(l)/float64(s.layers))
		}
	}
	mean := func(source, step int) float64 {
		return 1.1 + 0.25*float64(source%7) + 7.2*math.Pow(1+float64(step)/12, -0.45)
	}
	owed := make([]float64, len(s.sources))
	at := epoch
	for step := range s.steps {
		for _, r := range s.resumes {
			if r == step {
				put(object{"step": step, "resumed": object{"checkpoint": fmt.Sprintf("step-%08d", step), "time": at}})
			}
		}
		samples := s.batch
		if step > 0 && step == s.empty || s.back > 0 && step >= s.back && step < s.back+5 {
			samples = 0
		}
		if step > 0 && step == s.back {
			put(object{"step": step, "rollback": object{"step": step + 4, "spike": object{"what": "grad_norm",
				"value": 35.5, "mean": 0.7, "deviation": 0.2, "limit": 1.9},
				"left_out": object{"from": step * s.batch, "to": (step + 5) * s.batch}}})
		}
		drawn, losses := map[string]int{}, object{}
		counts := make([]int, len(s.sources))
		for range samples { // the source furthest behind its weight comes next
			most := 0
			for i := range owed {
				owed[i] += s.weights[i]
				if owed[i] > owed[most] {
					most = i
				}
			}
			owed[most]--
			counts[most]++
		}
		var loss float64
		for i, n := range counts {
			if n == 0 {
				continue
			}
			l := mean(i, step) + rng.NormFloat64()*0.25/math.Sqrt(float64(n))
			if step > 0 && (step == s.spike || step == s.skip) {
				l += 2.5
			}
			drawn[s.sources[i]] = n
			losses[s.sources[i]] = l
			loss += l * float64(n) / float64(samples)
		}
		tokens := samples * s.length
		var experts [][]int
		for l := range bias {
			settle := math.Exp(-float64(step)/(0.3*float64(s.planned))) + 0.08
			shares, total := make([]float64, s.experts), 0.0
			for e := range shares {
				shares[e] = math.Exp(bias[l][e]*settle + 0.05*rng.NormFloat64())
				total += shares[e]
			}
			row := make([]int, s.experts)
			for e := range row {
				row[e] = int(float64(tokens*2) * shares[e] / total)
			}
			experts = append(experts, row)
		}
		warm := float64(max(s.planned/20, 1))
		rate := 4e-4 * min(float64(step+1)/warm, 0.55+0.45*math.Cos(math.Pi*float64(step)/float64(s.planned)))
		norm := 0.4 + 3*math.Exp(-float64(step)/30) + 0.15*rng.ExpFloat64()
		if step > 0 && step == s.spike {
			norm = 180
		}
		seconds := 2.9 + 0.12*rng.NormFloat64()
		at = at.Add(time.Duration(seconds * 1e9))
		record := object{
			"step": step, "first": step * s.batch, "samples": samples, "tokens": tokens, "loss": loss,
			"aux_loss": 1.02 + math.Exp(-float64(step)/80), "z_loss": 0,
			"grad_norm": norm, "learning_rate": rate, "seconds": seconds,
			"tokens_per_second": float64(tokens) / seconds, "mfu": 1.1 * float64(tokens) / seconds / 8192, "time": at,
			"source_loss": losses, "source_samples": drawn,
		}
		if samples > 0 && s.layers > 0 {
			record["expert_tokens"] = experts
			entropies := make([]float64, s.layers)
			for l := range entropies {
				entropies[l] = math.Log(float64(s.experts)) * (0.97 - 0.05*float64(l)*(1-math.Exp(-float64(step)/100)))
			}
			record["router_entropy"] = entropies
		}
		if samples > 0 && step%10 == 0 {
			ratios := object{}
			for i, group := range []string{"embedding", "attention", "router", "experts", "norms", "head"} {
				ratios[group] = rate * (0.5 + float64(i)) * (1 + 0.1*rng.Float64())
			}
			record["update_ratio"] = ratios
		}
		if step > 0 && step == s.skip {
			record["skipped"] = object{"what": "loss", "value": loss, "mean": 2.1, "deviation": 0.05, "limit": 2.4}
		}
		if step > 0 && step == s.lost {
			record["skipped"] = object{"what": "loss", "not_finite": true}
			record["loss"], record["grad_norm"], record["source_loss"], record["source_samples"] = 0, 0, object{},
				object{}
			delete(record, "expert_tokens")
			delete(record, "router_entropy")
		}
		put(record)
		if s.evalEvery > 0 && (step+1)%s.evalEvery == 0 {
			losses, targets, total := object{}, object{}, 0.0
			for i, name := range s.sources {
				l := mean(i, step) + 0.08 + 0.01*rng.NormFloat64()
				losses[name], targets[name] = l, 4096
				total += l
			}
			put(object{"step": step + 1, "eval": object{"loss": total / float64(len(s.sources)), "source_loss": losses,
				"source_targets": targets}})
		}
	}
	config := fmt.Sprintf("# made up\noutput: .\nsteps: %d\nschedule:\n  learning_rate: 0.0004\n  warmup_steps: "+
		"%d\noptimizer: {betas: [0.9, 0.95]}\n", s.planned, max(s.planned/20, 1))
	if err := os.WriteFile(filepath.Join(dir, configFile), []byte(config), 0o666); err != nil {
		t.Fatal(err)
	}
	if err := out.Flush(); err != nil {
		t.Fatal(err)
	}
	return dir
}

func (s simulation) read(t testing.TB, name string) *Run {
	t.Helper()
	run, err := Read(s.write(t, name))
	if err != nil {
		t.Fatal(err)
	}
	return run
}
