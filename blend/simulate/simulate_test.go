package simulate

import (
	"context"
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"mula/blend"
	"mula/blend/plantest"
	"mula/index"
	"mula/internal/quantity"
	"mula/shards"
)

func TestMain(m *testing.M) {
	if url := os.Getenv(storeVariable); url != "" {
		if err := readStore(context.Background(), url, 16, 1, func() {}); err != nil {
			panic(err)
		}
		return
	}
	plantest.Main(m)
}

const sequenceLength = 16

// seal builds shards web-0, web-1 and code of generated documents, some of them longer than a
// window, and web-2 too short for a window, and a plan over them, with the lines of config added.
func seal(t testing.TB, seed uint64, config string) *blend.Data {
	t.Helper()
	dir := t.TempDir()
	for i, name := range []string{"web-0", "web-1", "code", "web-2"} {
		rng := rand.New(rand.NewPCG(seed, uint64(i)))
		var documents [][]uint32
		for left := []int{3000, 5000, 2500, 9}[i]; left > 0; {
			document := make([]uint32, 1+rng.IntN(min(70, left)))
			if rng.IntN(20) == 0 {
				document = nil // empty
			}
			left -= len(document)
			documents = append(documents, document)
		}
		plantest.Shard(t, filepath.Join(dir, name), []shards.DType{shards.UInt16, shards.UInt16, shards.Int32,
			shards.UInt16}[i], 1000, documents)
	}
	return open(t, plantest.Seal(t, dir, "plan.json", fmt.Sprintf("sequence_length: %d\nseed: %d\nsources:\n- "+
		"{name: web, shards: [web-0, web-1, web-2], weight: 0.7}\n"+
		"- {name: code, shards: [code], weight: 0.3}\n%s", sequenceLength, seed, config)))
}

func open(t testing.TB, path string) *blend.Data {
	t.Helper()
	data := plantest.Open(t, path)
	t.Cleanup(func() { data.Close() })
	return data
}

const stagesAndSkips = "validation: 0.05\nsamples: 1501\nstages:\n- samples: 250\n- {samples: rest, weights: {web: " +
	"0.5, code: 0.5}}\nskips:\n- {from: 37, to: 41}\n- {from: 310, to: 345}\n"

// Windows that shuffle in blend.yaml keeps together are notes.
func TestClustersOfBlocks(t *testing.T) {
	d := seal(t, 1, "shuffle: {block: 32, group: 1}\n")
	r, err := Run(context.Background(), nil, Options{BatchSize: 16, Nodes: 1, Storage: Kinds[0], Data: d})
	if err != nil {
		t.Fatal(err)
	}
	clusters := 0
	for _, f := range r.Findings {
		if f.Level == Warning {
			t.Errorf("%+v", f)
		}
		if strings.Contains(f.Message, "not drawn evenly") || strings.Contains(f.Message, "adjacent windows") {
			clusters++
		}
	}
	if clusters == 0 {
		t.Errorf("no clusters: %+v", r.Findings)
	}
}

// The counts equal the counts of a plain loop over the positions, with the documents of each window
// from Parts.
func TestPlainCounting(t *testing.T) {
	for seed := range uint64(4) {
		d := seal(t, seed, stagesAndSkips)
		const batch = 12
		r, err := Run(context.Background(), nil, Options{BatchSize: batch, Nodes: 3, Storage: Kinds[0], Data: d})
		if err != nil {
			t.Fatal(err)
		}
		if !r.Shuffle.Whole || r.Shuffle.Samples != d.Length()-39 || r.Steps != (d.Length()+batch-1)/batch ||
			r.Mixture.StepsCounted != r.Mixture.StepsOfInterval {
			t.Fatalf("%+v, %d steps", r.Shuffle, r.Steps)
		}
		type sample struct {
			blend.Sample
			documents map[int64]bool
		}
		counts := make(map[[2]int64]int64)
		byPart := make(map[[3]int64]int64)
		drawn := make([][]sample, 2)
		for p := range d.Length() {
			s, parts, err := d.Peek(context.Background(), p)
			if err != nil {
				t.Fatal(err)
			}
			interval := p / batch / r.Mixture.StepsOfInterval
			counts[[2]int64{interval, int64(s.Source)}]++
			byPart[[3]int64{interval, int64(s.Source), s.Window * 16 / d.Sources[s.Source].Training()}]++
			documents := make(map[int64]bool)
			for _, part := range parts {
				documents[part.Number] = true
			}
			if !s.Skipped {
				drawn[s.Source] = append(drawn[s.Source], sample{s, documents})
			}
		}
		for i, v := range r.Mixture.Intervals {
			for source, n := range v.Counts {
				if n != counts[[2]int64{int64(i), int64(source)}] {
					t.Errorf("seed %d: interval %d has %d of source %d, want %d", seed, i, n, source,
						counts[[2]int64{int64(i), int64(source)}])
				}
				for k, n := range r.Mixture.Sources[source].Parts[i] {
					if want := byPart[[3]int64{int64(i), int64(source), int64(k)}]; n != want {
						// window·16/training and the begin of a part, training·k/16, round apart at
						// most at a border
						if math.Abs(float64(n-want)) > 3 {
							t.Errorf("seed %d: interval %d, source %d, part %d: %d, want %d", seed, i, source, k, n,
								want)
						}
					}
				}
			}
		}
		for i, v := range r.Mixture.Intervals {
			first, end := int64(i)*r.Mixture.StepsOfInterval*batch, min(d.Length(),
				int64(i+1)*r.Mixture.StepsOfInterval*batch)
			want := 0.0
			for j, st := range d.Summary().Stages {
				// the count up to the end may be off, and that up to the begin the other way
				if end > st.First && first < st.First+st.Samples {
					want += st.Bound
				}
				if first > st.First && first < st.First+st.Samples {
					want += st.Bound
				}
				for source := range v.Counts {
					a, b := max(first, st.First), min(end, st.First+st.Samples)
					v.Expected[source] -= max(0, float64(b-a)) * []float64{[]float64{0.7, 0.3}[source], 0.5}[j]
				}
			}
			if math.Abs(v.Bound-want) > 1e-9 || math.Abs(v.Expected[0])+math.Abs(v.Expected[1]) > 1e-6 {
				t.Errorf("seed %d: interval %d has the bound %g, want %g; %v too many expected", seed, i, v.Bound, want,
					v.Expected)
			}
		}
		for i, source := range r.Sources {
			want := int64(0)
			for _, sh := range d.Sources[i].Shards {
				end := int64(0) // of the last window
				for w := int64(0); (w+1)*sequenceLength+1 <= sh.Tokens; w++ {
					end = (w+1)*sequenceLength + 1
				}
				want += sh.Tokens - end
			}
			if source.Tail != want {
				t.Errorf("seed %d, source %d: %d tokens in no window, want %d", seed, i, source.Tail, want)
			}
		}
		sharing := func(a, b sample) bool {
			if a.Shard != b.Shard || a.Window == b.Window {
				return false
			}
			for n := range a.documents {
				if b.documents[n] {
					return true
				}
			}
			return false
		}
		for source, list := range drawn {
			got := r.Shuffle.Sources[source]
			var adjacent, shard, document, inBatch, again, epochs int64
			distance, turns := 0.0, 0.0
			windows := make(map[int64]int64)
			read := make(map[[2]int64]int64)
			for i, s := range list {
				windows[s.Window]++
				for n := range s.documents {
					read[[2]int64{int64(s.Shard), n}]++
				}
				for _, b := range list[i+1:] {
					if s.Position/batch == b.Position/batch {
						if sharing(s, b) {
							inBatch++
						}
						if s.Window == b.Window {
							again++
						}
						if s.Epoch != b.Epoch {
							turns += 1 / float64(d.Sources[source].Training())
						}
					}
					if s.Window == b.Window && s.Epoch == b.Epoch {
						epochs++
					}
				}
				if i == 0 {
					continue
				}
				a := list[i-1]
				distance += math.Abs(float64(s.Window - a.Window))
				if s.Window-a.Window == 1 || a.Window-s.Window == 1 {
					adjacent++
				}
				if a.Shard == s.Shard {
					shard++
				}
				if sharing(a, s) {
					document++
				}
			}
			pairs := float64(len(list) - 1)
			want := []any{int64(len(list)), int64(len(list) - 1), adjacent, shard, document, inBatch, again, epochs}
			if have := []any{got.Samples, got.Pairs, got.Adjacent.Seen, got.SameShard.Seen, got.SameDocument.Seen,
				got.BatchDocument.Seen, got.BatchWindow.Seen, got.EpochWindow}; !slices.Equal(have, want) {
				t.Errorf("seed %d, source %d: %v, want %v", seed, source, have, want)
			}
			if mean := distance / pairs / float64(d.Sources[source].Training()); math.Abs(mean-got.Distance) > 1e-9 {
				t.Errorf("seed %d, source %d: distance %g, want %g", seed, source, got.Distance, mean)
			}
			if math.Abs(turns-got.BatchWindow.Expected) > 1e-9 || turns == 0 {
				t.Errorf("seed %d, source %d: %g windows twice in a step are expected, want %g", seed, source,
					got.BatchWindow.Expected, turns)
			}
			times := make(map[int64]int64)
			for _, n := range windows {
				times[n]++
			}
			for _, w := range got.Windows {
				if times[w.Times] != w.Windows {
					t.Errorf("seed %d, source %d: %d windows drawn %d times, want %d", seed, source, w.Windows, w.Times,
						times[w.Times])
				}
				delete(times, w.Times)
			}
			if len(times) > 0 {
				t.Errorf("seed %d, source %d: missing %v", seed, source, times)
			}
			classes := make([]int64, len(passClasses))
			most := int64(0)
			for key, samples := range read {
				shard, err := shards.Open(d.ShardPath(source, int(key[0])))
				if err != nil {
					t.Fatal(err)
				}
				span, err := shard.Span(key[1])
				if err != nil {
					t.Fatal(err)
				}
				holding := int64(0) // windows that hold a token of it, tried one by one
				for w := int64(0); (w+1)*sequenceLength < shard.Tokens(); w++ {
					if w*sequenceLength < span.End && span.First <= (w+1)*sequenceLength {
						holding++
					}
				}
				shard.Close()
				classes[passClass(samples, holding)]++
				most = max(most, samples)
			}
			for k, p := range got.Documents {
				if p.Documents != classes[k] {
					t.Errorf("seed %d, source %d: %d documents read %s times, want %d", seed, source, p.Documents,
						p.Passes, classes[k])
				}
			}
			if got.Most.Samples != most || read[[2]int64{int64(got.Most.Shard), got.Most.Document}] != most {
				t.Errorf("seed %d, source %d: most read %+v, want %d", seed, source, got.Most, most)
			}
		}
	}
}

// The pairs of windows that share a document by chance are all such pairs of the source's windows,
// if every window was read.
func TestExpectedSharing(t *testing.T) {
	d := seal(t, 9, "samples: 3000\n")
	r, err := Run(context.Background(), nil, Options{BatchSize: 10, Nodes: 1, Storage: Kinds[0], Data: d, To: 3000})
	if err != nil {
		t.Fatal(err)
	}
	for i, s := range r.Shuffle.Sources {
		m := d.Sources[i].Training()
		if r.Sources[i].Samples < m {
			t.Fatalf("source %d: %d samples of %d windows", i, r.Sources[i].Samples, m)
		}
		var all, document, shard float64
		var windows [][]blend.Part
		for w := range m {
			for p := range d.Length() { // a position that has it
				if at, err := d.Locate(p); err == nil && at.Source == i && at.Window == w {
					parts, err := d.Parts(context.Background(), at)
					if err != nil {
						t.Fatal(err)
					}
					windows = append(windows, parts)
					break
				}
			}
		}
		for a := range windows {
			for b := range a {
				all++
				if windows[a][0].Shard == windows[b][0].Shard {
					shard++
					if slices.ContainsFunc(windows[a], func(x blend.Part) bool {
						return slices.ContainsFunc(windows[b], func(y blend.Part) bool { return x.Number == y.Number })
					}) {
						document++
					}
				}
			}
		}
		pairs := float64(s.Pairs)
		if math.Abs(s.SameShard.Expected-pairs*shard/all) > 1e-6*pairs {
			t.Errorf("source %d: %g pairs of one shard expected, want %g", i, s.SameShard.Expected, pairs*shard/all)
		}
		// Windows looked at twice count twice in the mean: a few per cent.
		if want := pairs * document / all; math.Abs(s.SameDocument.Expected-want) > 0.1*want {
			t.Errorf("source %d: %g pairs of one document expected, want %g", i, s.SameDocument.Expected, want)
		}
	}
}

// A testOrder has other windows, or sources, at the positions of a plan.
type testOrder struct {
	*blend.Plan
	change func(s *blend.Sample)
}

func (o testOrder) Locate(position int64) (blend.Sample, error) {
	s, err := o.Plan.Locate(position)
	if err == nil {
		o.change(&s)
		src := &o.Sources[s.Source]
		w := s.Window
		for k, sh := range src.Shards { // where the window lies
			n := index.ShardWindows(o.SequenceLength, sh.Tokens)
			if w < n {
				s.Shard, s.Token = k, w*int64(o.SequenceLength)
				break
			}
			w -= n
		}
	}
	return s, err
}

func (o testOrder) Positions(_ context.Context, from, to int64) iter.Seq2[blend.Block, error] {
	return func(yield func(blend.Block, error) bool) {
		b := blend.Block{First: from}
		for p := from; p < to; p++ {
			s, err := o.Locate(p)
			if err != nil {
				yield(b, err)
				return
			}
			b.Sources, b.Windows = append(b.Sources, int32(s.Source)), append(b.Windows, s.Window)
		}
		yield(b, nil)
	}
}

// warnings are the messages about the order.
func warnings(r *Report) string {
	var list []string
	for _, f := range r.Findings {
		if f.Level == Warning {
			list = append(list, f.Source+": "+f.Message)
		}
	}
	return strings.Join(list, "\n")
}

// Orders that shuffle badly are seen to be bad, each in the way it is.
func TestBadOrders(t *testing.T) {
	d := seal(t, 3, "samples: 6000\n")
	numbers := make(map[int64]int64) // of each position, among the positions of its source
	next := make([]int64, 2)
	for p := range d.Length() {
		s, err := d.Locate(p)
		if err != nil {
			t.Fatal(err)
		}
		numbers[p] = next[s.Source]
		next[s.Source]++
	}
	m := func(s *blend.Sample) int64 { return d.Sources[s.Source].Training() }
	shuffled := rand.New(rand.NewPCG(1, 2)).Perm(1000)
	for _, c := range []struct {
		name   string
		change func(s *blend.Sample)
		says   []string
	}{
		{"not shuffled", func(s *blend.Sample) { s.Window = numbers[s.Position] % m(s) },
			[]string{"not drawn evenly", "consecutive samples is 0.00", "adjacent windows",
				"pairs of consecutive samples share a document", "of a step share a document"}},
		{"blocks of 8 shuffled, not what is in them", func(s *blend.Sample) {
			k, blocks := numbers[s.Position]%m(s), m(s)/8
			if k < 8*blocks {
				block := int64(0)
				for i, n := 0, int64(0); ; i++ { // the k/8-th of the numbers below blocks
					if int64(shuffled[i]) < blocks {
						if n == k/8 {
							block = int64(shuffled[i])
							break
						}
						n++
					}
				}
				s.Window = 8*block + k%8
			}
		}, []string{"adjacent windows", "share a document"}},
		{"even windows first, odd ones after", func(s *blend.Sample) {
			k := numbers[s.Position] % m(s)
			half := (m(s) + 1) / 2
			if k < half {
				s.Window = 2 * (k * 7 % half)
			} else {
				s.Window = 2*((k-half)*7%(m(s)/2)) + 1
			}
		}, []string{"change between even and odd"}},
		{"drawn with replacement", func(s *blend.Sample) {
			s.Window = int64(rand.New(rand.NewPCG(uint64(s.Position), 9)).Int64N(m(s)))
		}, []string{"repeat a window of the same epoch"}},
		{"each drawn twice in a row", func(s *blend.Sample) {
			k := numbers[s.Position] / 2 % m(s)
			s.Window, s.Epoch = k*101%m(s), numbers[s.Position]%2
		}, []string{"repeat a window of the same step"}},
		{"sources by chance", func(s *blend.Sample) {
			if rng := rand.New(rand.NewPCG(uint64(s.Position), 5)); rng.IntN(10) < 7 {
				s.Source = 0
			} else {
				s.Source = 1
			}
			s.Window = int64(rand.New(rand.NewPCG(uint64(s.Position), 6)).Int64N(m(s)))
		}, []string{"the share deviates from the weights"}},
	} {
		o := Options{BatchSize: 20, Nodes: 1, Storage: Kinds[0], Data: d, Order: testOrder{d.Plan, c.change}}
		r, err := Run(context.Background(), d.Plan, o)
		if err != nil {
			t.Fatal(err)
		}
		got := warnings(r)
		for _, want := range c.says {
			if !strings.Contains(got, want) {
				t.Errorf("%s: does not say %q, but\n%s", c.name, want, got)
			}
		}
	}
}

// An order may be shorter than the plan: only positions of the range are read from it.
func TestShortOrder(t *testing.T) {
	const to = 200
	d := seal(t, 3, "samples: 600\n")
	order := testOrder{d.Plan, func(s *blend.Sample) {
		if s.Position >= to {
			t.Errorf("position %d is read, but the range ends at %d", s.Position, to)
		}
	}}
	if _, err := Run(t.Context(), nil, Options{BatchSize: 20, Nodes: 1, Storage: Kinds[0], To: to, Data: d,
		Order: order}); err != nil {
		t.Fatal(err)
	}
}

// The plan's own order is found to be good, whatever the seed; the figures that compare with chance
// stay near it.
func TestGoodOrders(t *testing.T) {
	d := seal(t, 4, "samples: 6000\n")
	distance, parity, n := 0.0, 0.0, 0.0
	for seed := range uint64(40) {
		data := plantest.Open(t, plantest.Seal(t, t.TempDir(), "plan.json", fmt.Sprintf("sequence_length: %d\nseed: "+
			"%d\nsamples: %d\nsources:\n- {name: web, shards: [%q, %q], weight: 0.7}\n- {name: code, shards: [%q], "+
			"weight: 0.3}\n",
			sequenceLength, seed, []int{500, 6000}[seed%2], d.ShardPath(0, 0), d.ShardPath(0, 1), d.ShardPath(1, 0))))
		r, err := Run(context.Background(), nil, Options{BatchSize: 20, Nodes: 2, Storage: Kinds[0], Data: data})
		data.Close()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range r.Findings {
			if f.Level == Warning {
				t.Errorf("seed %d: %s: %s", seed, f.Source, f.Message)
			}
		}
		for _, s := range r.Shuffle.Sources {
			distance, parity, n = distance+s.DistanceOff*s.DistanceOff, parity+s.ParityOff*s.ParityOff, n+1
		}
	}
	// They are in standard deviations: the mean of their squares is about 1. Epochs are
	// permutations, which makes it a little less.
	if distance /= n; distance < 0.4 || distance > 1.8 {
		t.Errorf("the mean distance is off by %.2f standard deviations", math.Sqrt(distance))
	}
	if parity /= n; parity < 0.3 || parity > 1.8 {
		t.Errorf("parity is off by %.2f standard deviations", math.Sqrt(parity))
	}
}

// Values in standard deviations are correct: over many random orders their mean square is 1, and
// for the unevenness the mean is 0.
func TestDeviations(t *testing.T) {
	const windows, pairs, runs = 100_000, 1000, 400
	rng := rand.New(rand.NewPCG(1, 1))
	d := seal(t, 4, "samples: 6000\n")
	s := &simulation{plan: d.Plan, traits: d.Traits()}
	distance, parity := 0.0, 0.0
	for range runs {
		tally := sourceTally{training: windows, known: true, last: -1}
		for range pairs + 1 {
			tally.pair(rng.Int64N(windows))
		}
		out, err := s.sourceShuffle(0, &tally, nil, false)
		if err != nil {
			t.Fatal(err)
		}
		distance, parity = distance+out.DistanceOff*out.DistanceOff/runs, parity+out.ParityOff*out.ParityOff/runs
	}
	if math.Abs(distance-1) > 0.25 || math.Abs(parity-1) > 0.25 { // the mean of 400 squares is 0.07 off
		t.Errorf("mean squares of %.3f and %.3f", distance, parity)
	}
	uneven, n := 0.0, 0.0
	for seed := range uint64(50) {
		order := testOrder{d.Plan, func(s *blend.Sample) {
			s.Window = rand.New(rand.NewPCG(uint64(s.Position), seed)).Int64N(d.Sources[s.Source].Training())
		}}
		r, err := Run(context.Background(), d.Plan, Options{BatchSize: 20, Nodes: 1, Storage: Kinds[0], Order: order})
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range r.Mixture.Sources {
			uneven, n = uneven+m.Unevenness, n+1
		}
	}
	if uneven /= n; math.Abs(uneven) > 0.35 { // the mean of 100 is 0.1 off
		t.Errorf("unevenness of %.2f on the mean", uneven)
	}
}

// uniform is the result for all pairs of windows.
func TestUniform(t *testing.T) {
	for n := int64(2); n < 90; n++ {
		want := make([]float64, distanceBins)
		for a := range n {
			for b := range n {
				if a != b {
					d := max(a-b, b-a)
					want[min(distanceBins-1, int(float64(d)/float64(n)*distanceBins))] += 1 / float64(n*(n-1))
				}
			}
		}
		for i, got := range uniform(n) {
			if math.Abs(got-want[i]) > 1e-9 {
				t.Fatalf("%d windows: distances in part %d: %g, want %g", n, i, got, want[i])
			}
		}
	}
}

// Parts have the same size to within one window, and every window is in the part that partFrom
// returns.
func TestParts(t *testing.T) {
	for _, n := range []int64{16, 17, 31, 32, 1000, 65537} {
		sizes := make([]int64, parts)
		for w := range n {
			k := partOf(w, n)
			if w < partFrom(k, n) || w >= partFrom(k+1, n) {
				t.Fatalf("window %d of %d is in part %d, [%d, %d)", w, n, k, partFrom(k, n), partFrom(k+1, n))
			}
			sizes[k]++
		}
		if slices.Max(sizes)-slices.Min(sizes) > 1 {
			t.Errorf("%d windows: parts of %v", n, sizes)
		}
	}
}

// Where not all of a range is looked at, it is stretches from its begin to its end, within what may
// be looked at.
func TestLimits(t *testing.T) {
	for _, c := range []struct {
		length, samples int64
		batch           int
	}{{1 << 40, 1 << 20, 512}, {1 << 20, 1000, 7}, {1000, 1, 10}, {999, 1 << 20, 10}, {12345, 12345, 1}} {
		s := &simulation{Options: Options{BatchSize: c.batch, To: c.length, Samples: c.samples}}
		var looked int64
		steps := (c.length + int64(c.batch) - 1) / int64(c.batch)
		list := s.stretchesOfSteps()
		for i, p := range list {
			if p[0] >= p[1] || p[1] > steps || i > 0 && p[0] < list[i-1][1] {
				t.Fatalf("%+v: stretches %v", c, list)
			}
			looked += p[1] - p[0]
		}
		if looked > max(1, c.samples/int64(c.batch)) || list[0][0] != 0 || len(list) > 1 &&
			list[len(list)-1][1] != steps {
			t.Errorf("%+v: %d steps of %d, %v", c, looked, steps, list)
		}
		every, counted, n := s.intervals()
		if n > maxIntervals || every*n < steps || every*(n-1) >= steps || counted < 1 ||
			counted > min(every, intervalSteps) ||
			counted > 1 && counted*n*int64(c.batch) > c.samples*countedFactor {
			t.Errorf("%+v: %d intervals of %d steps, %d counted", c, n, every, counted)
		}
	}
}

// A plan that amends another is found to be good, its grown source without a comparison that its
// growth would make wrong.
func TestAmended(t *testing.T) {
	d := seal(t, 5, "samples: 700\n")
	other := seal(t, 50, "samples: 10\n")
	a, err := blend.ParseAmendment(fmt.Appendf(nil,
		"samples: 3000\nsources:\n- {name: web, shards: [%q]}\n- {name: more, shards: [%q]}\nweights: {web: 0.5, "+
			"code: 0.2, more: 0.3}\n",
		other.ShardPath(0, 0), other.ShardPath(0, 1)), "amend.yaml", "/")
	if err != nil {
		t.Fatal(err)
	}
	a.At = 400
	plan, err := blend.Amend(context.Background(), d.Plan, a, blend.SealOptions{})
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "amended.json")
	if err := plan.Write(path); err != nil {
		t.Fatal(err)
	}
	r, err := Run(context.Background(), nil, Options{BatchSize: 20, Nodes: 2, Storage: Kinds[1], Data: open(t, path)})
	if err != nil {
		t.Fatal(err)
	}
	web := r.Shuffle.Sources[0]
	if w := warnings(r); w != "" || r.Order != "2" || len(r.Sources) != 3 || r.Mixture.Sources[0].Parts != nil ||
		web.Adjacent.Expected != -1 || web.SameDocument.Expected != -1 ||
		r.Shuffle.Sources[2].SameDocument.Expected <= 0 || r.Sources[2].Samples == 0 {
		t.Errorf("%s; order %s, %+v", w, r.Order, r.Shuffle.Sources)
	}
	parse(t, render(t, r))
}

// What a packed plan reads is the pieces of its samples, which may be of several shards.
func TestPacked(t *testing.T) {
	d := seal(t, 5, "samples: 900\npacking: best_fit\npad: 0\n")
	storage := Kinds[0]
	storage.RequestSize = 512
	r, err := Run(context.Background(), nil, Options{BatchSize: 20, Nodes: 1, Storage: storage, Data: d})
	if err != nil {
		t.Fatal(err)
	}
	tokens := 0
	for p := range d.Length() {
		s, parts, err := d.Peek(context.Background(), p)
		if err != nil {
			t.Fatal(err)
		}
		for _, part := range parts {
			tokens += (part.To - part.From) * (2 + 2*s.Source)
		}
	}
	if got := r.Reading.TokenBytes * float64(r.Reading.Steps); math.Abs(got-float64(tokens)) > 1e-6 ||
		r.Order != "packed 1" || r.Shuffle.Documents || warnings(r) != "" {
		t.Errorf("%g bytes of tokens, want %d; order %s, documents %v, %s", got, tokens, r.Order, r.Shuffle.Documents,
			warnings(r))
	}
	if r.Sources[0].Packing == nil || r.Sources[0].Tail != -1 || !strings.Contains(render(t, r), " padding (") {
		t.Errorf("%+v", r.Sources[0])
	}
}

// The plan's last step is a short one: a sample has as many bytes as in a whole one, and all steps
// together ask for what all samples do.
func TestShortStep(t *testing.T) {
	d := seal(t, 5, "samples: 100\n")
	storage := Kinds[0]
	storage.RequestSize = 1 << 30 // one for each sample
	for _, batch := range []int{64, 512} {
		r, err := Run(context.Background(), nil, Options{BatchSize: batch, Nodes: 1, Storage: storage, Data: d})
		if err != nil {
			t.Fatal(err)
		}
		bytes := 0
		for p := range d.Length() {
			s, err := d.Locate(p)
			if err != nil {
				t.Fatal(err)
			}
			bytes += (sequenceLength + 1) * (2 + 2*s.Source)
		}
		if got := r.Reading.AllRequests; math.Abs(got-100) > 1e-6 {
			t.Errorf("steps of %d: %g requests in the whole range, want 100", batch, got)
		}
		if want := "a sample has " + quantity.Bytes(int64(bytes/100)); !slices.ContainsFunc(r.Findings,
			func(f Finding) bool { return strings.Contains(f.Message, want) }) {
			t.Errorf("steps of %d: none of the findings says %q: %v", batch, want, r.Findings)
		}
	}
}

// What cannot be simulated is refused in a sentence.
func TestRefused(t *testing.T) {
	d := seal(t, 1, "samples: 100\n")
	good := Options{BatchSize: 10, Nodes: 1, Storage: Kinds[0], Data: d}
	for want, change := range map[string]func(o *Options){
		"0 nodes":                 func(o *Options) { o.Nodes = 0 },
		"cannot be divided":       func(o *Options) { o.Nodes = 3 },
		"batch size -1":           func(o *Options) { o.BatchSize = -1 },
		"not the start of a step": func(o *Options) { o.From = 5 },
		"are not all in the plan": func(o *Options) { o.To = 101 },
		"both 100":                func(o *Options) { o.From = 100 },
		"step time NaN":           func(o *Options) { o.StepTime = math.NaN() },
		"number of samples":       func(o *Options) { o.Samples = -1 },
		"node_bandwidth is 0":     func(o *Options) { o.Storage.NodeBandwidth = 0 },
		"name the storage":        func(o *Options) { o.Storage = Storage{} },
		"and at most 16":          func(o *Options) { o.RanksPerNode = math.MaxInt },
	} {
		o := good
		change(&o)
		if _, err := Run(context.Background(), nil, o); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v; want %q", err, want)
		}
	}
	packed := seal(t, 1, "samples: 100\npacking: best_fit\npad: 0\n")
	if _, err := Run(context.Background(), packed.Plan, Options{BatchSize: 10, Nodes: 1,
		Storage: Kinds[0]}); err == nil || !strings.Contains(err.Error(), "packed 1") {
		t.Errorf("a packed plan that is not open: %v", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Run(ctx, nil, good); err == nil {
		t.Error("a simulation that was ended gives a report")
	}
}
