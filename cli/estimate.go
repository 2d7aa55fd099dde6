package cli

import (
	"fmt"
	"io"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/internal/atomicfile"
	"mula/internal/quantity"
	"mula/moe"
	"mula/train"
	"mula/train/estimate"
	"mula/xpu"
	"mula/xpu/comm"
)

// Values of --collectives.
const (
	twoLevels = "two-level"
	flat      = "flat"
)

func estimateCommand() *cli.Command {
	return &cli.Command{
		Name:  "estimate",
		Usage: "estimate memory, traffic, time and scaling of a model on many ranks of a machine",
		Description: "Bytes and numbers of weights are exact. Times come from a model of the machine. The output " +
			"lists the\n" +
			"model's assumed figures, and the step time if each is 20 % off. docs/reference/estimate.md has the\n" +
			"formulas, the machines and the format of a machine file.\n\n" +
			"Example: mula estimate --model mula-20b-a2b --layout expert_dp=256,ep=12 --machine aurora \\\n" +
			"             --scaling 384:12288 --compare so,epso --plot scaling.svg",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "model", Usage: "use the preset `NAME`, as model.preset in train.yaml: " +
				"" + anyOf(moe.Presets())},
			&cli.StringFlag{Name: "config",
				Usage: "read model, layout, batch and plan from the train.yaml `FILE`; other flags override its " +
					"values"},
			setFlag(),
			&cli.StringFlag{Name: "layout", Usage: "sizes of the axes that are not 1, as " +
				"`expert_dp=256,ep=12,pp=4`, and cp, sum_replicas and virtual_stages as in train.yaml"},
			&cli.StringFlag{Name: "optimizer",
				Usage: "scheme that divides the weight updates between ranks: " + anyOf(estimate.Schemes()),
				Value: string(estimate.EPSO)},
			&cli.StringFlag{Name: "dispatch",
				Usage: "exchange that sends tokens to their experts: " + anyOf(moe.Dispatches()),
				Value: string(moe.AllToAll)},
			&cli.StringFlag{Name: "norm", Usage: "`WAY` in which ranks add the norm of the gradient, as layout.norm " +
				"in train.yaml: gather or reduce", Value: "gather"},
			&cli.IntFlag{Name: "batch-size", Usage: "sequences per step (0: one micro-batch per rank)"},
			&cli.IntFlag{Name: "micro-batch-size", Usage: "sequences that a rank computes at once", Value: 1},
			&cli.IntFlag{Name: "sequence-length", Usage: "tokens per sequence; with --config the plan's", Value: 2048},
			&cli.StringFlag{Name: "recompute",
				Usage: "activations that the backward pass recomputes: " + anyOf(moe.Recomputes()),
				Value: string(moe.RecomputeNone)},
			&cli.StringFlag{Name: "activations",
				Usage: "`TYPE` of the large activations, as activations in train.yaml: fp32 or bf16",
				Value: xpu.Float32.String()},
			&cli.StringFlag{Name: "precision", Usage: precisionFlag.Usage, Value: string(xpu.BF16)},
			&cli.StringFlag{Name: "trainer",
				Usage: "byte sizes of this trainer: mula (the types of --precision, fp32 activations) or optimus " +
					"(bf16 weights, gradients and traffic, and an fp32 master copy; it trained the Mula " +
					"models)", Value: estimate.Mula.Name},
			&cli.StringFlag{Name: "collectives",
				Usage: "`KIND` of exchanges between ranks: two-level (inside a node and between nodes) or flat " +
					"(each rank with each other rank, as if mula did not know the nodes)", Value: twoLevels},
			&cli.StringFlag{Name: "machine",
				Usage: "aurora, local (this machine, measured now), or a `FILE` that ends in .yaml",
				Value: estimate.Aurora.Name},
			&cli.StringFlag{Name: "scaling",
				Usage: "double expert_dp from the first number of ranks to the second, as `384:12288`"},
			&cli.BoolFlag{Name: "strong",
				Usage: "with --scaling: keep the batch size constant (strong scaling) instead of growing it with " +
					"the ranks"},
			&cli.StringFlag{Name: "compare", Usage: "estimate several optimizer schemes, as `so,epso`: " +
				"" + anyOf(estimate.Schemes())},
			&cli.StringFlag{Name: "plot", Usage: "draw the step times and the scaling in the SVG `FILE`"},
			&cli.BoolFlag{Name: "published",
				Usage: "compare published figures of the Mula runs on Aurora with estimates, and explain the " +
					"differences"},
			jsonFlag,
		},
		Action: runEstimate,
	}
}

func runEstimate(c *cli.Context) error {
	if err := noOperands(c); err != nil {
		return err
	}
	if c.Bool("published") {
		return printPublished(c)
	}
	if err := atMost(c, math.MaxInt32, "batch-size", "micro-batch-size", "sequence-length"); err != nil {
		return err
	}
	in, err := estimateInput(c)
	if err != nil {
		return err
	}
	if in.Machine, err = findMachine(c, in.Layout.Ranks()); err != nil {
		return err
	}
	schemes := []estimate.Scheme{in.Layout.Optimizer}
	if c.IsSet("compare") {
		schemes = nil
		for _, name := range splitList(c.String("compare")) {
			if s := estimate.Scheme(name); !slices.Contains(schemes, s) {
				schemes = append(schemes, s)
			}
		}
	}
	from, to := 0, 0
	if c.IsSet("scaling") {
		if from, to, err = rankRange(c.String("scaling")); err != nil {
			return err
		}
	} else if c.Bool("strong") {
		return usagef("--strong applies to --scaling; add --scaling or remove --strong")
	}
	var report estimateReport
	for _, scheme := range schemes {
		in.Layout.Optimizer = scheme
		r, err := estimate.Compute(in)
		if err != nil {
			return usagef("%s", err)
		}
		report.Results = append(report.Results, r)
		if c.IsSet("scaling") {
			points, err := estimate.Scaling(in, from, to, c.Bool("strong"))
			if err != nil {
				return usagef("--scaling: %s", err)
			}
			report.Scaling = append(report.Scaling, estimate.Curve{Scheme: scheme, Points: points})
		}
	}
	in.Layout.Optimizer = schemes[len(schemes)-1]
	if report.Assumptions, err = estimate.Sensitivities(in, from, to, c.Bool("strong")); err != nil {
		return err
	}
	if path := c.String("plot"); path != "" {
		if err := notInput(path, c.String("config"), c.String("machine")); err != nil {
			return err
		}
		if err := oneFile(path, drawingKind); err != nil {
			return err
		}
		if !strings.EqualFold(filepath.Ext(path), ".svg") {
			return usagef("--plot %q: the drawing is SVG; use a name that ends in .svg", path)
		}
		if err := atomicfile.WriteFile(path, estimate.Chart(report.Results, report.Scaling)); err != nil {
			return err
		}
		fmt.Fprintf(c.App.ErrWriter, "wrote %s\n", filepath.ToSlash(path))
	}
	if c.Bool("json") {
		return printJSON(c.App.Writer, report)
	}
	report.write(c.App.Writer)
	return nil
}

// estimateInput reads the input of the estimate, except for the machine, from the flags and the
// train.yaml, if any.
func estimateInput(c *cli.Context) (estimate.Input, error) {
	var in estimate.Input
	if path := c.String("config"); path != "" {
		if c.IsSet("model") || c.IsSet("sequence-length") {
			return in, usagef("--config names the model and the plan; remove --model and --sequence-length")
		}
		config, err := train.LoadConfig(path, settings(c)...)
		if err != nil {
			return in, err
		}
		warnAbout(c, config)
		plan, err := config.ReadPlan()
		if err != nil {
			return in, fmt.Errorf("%w; the plan has the sequence length", config.Locate(err))
		}
		if in, err = config.EstimateInput(plan, estimate.Machine{}); err != nil {
			return in, config.Locate(err)
		}
	} else {
		if c.IsSet("set") {
			return in, usagef("--set replaces values of a train.yaml; add --config")
		}
		if err := needFlags(c, "model"); err != nil {
			return in, err
		}
		config, err := moe.Preset(c.String("model"))
		if err != nil {
			return in, usagef("--model: %s", err)
		}
		in = estimate.Input{Model: c.String("model"), Config: config}
	}
	l := &in.Layout
	given := func(name string) bool { return c.IsSet(name) || c.String("config") == "" }
	if given("layout") {
		warnings, err := parseLayout(c.String("layout"), l)
		if err != nil {
			return in, err
		}
		printWarnings(c.App.ErrWriter, warnings)
	}
	if given("optimizer") {
		l.Optimizer = estimate.Scheme(c.String("optimizer"))
	}
	if given("norm") {
		l.ReduceNorm = c.String("norm") == "reduce"
	}
	if given("dispatch") {
		l.Dispatch = moe.Dispatch(c.String("dispatch"))
	}
	if given("recompute") {
		l.Recompute = moe.Recompute(c.String("recompute"))
	}
	if given("activations") {
		l.Activations = xpu.Float32
		if c.String("activations") == xpu.BFloat16.String() {
			l.Activations = xpu.BFloat16
		}
	}
	if given("micro-batch-size") {
		l.MicroBatchSize = c.Int("micro-batch-size")
	}
	if given("batch-size") {
		l.BatchSize = c.Int("batch-size")
		if l.BatchSize == 0 {
			l.BatchSize = l.Ranks() * l.MicroBatchSize / (max(1, l.SequenceRanks) * l.Size(comm.TP))
		}
	}
	if c.String("config") == "" {
		l.SequenceLength = c.Int("sequence-length")
	}
	configured := in.Precision
	if given("precision") {
		in.Precision = xpu.Precision(c.String("precision"))
	}
	if given("trainer") {
		trainer, err := estimate.TrainerByName(c.String("trainer"))
		if err != nil {
			return in, usagef("--trainer: %s", err)
		}
		in.Trainer = trainer
	}
	switch mixed := in.Precision.Weights() == xpu.BFloat16; {
	case mixed && in.Trainer.Own && !in.Trainer.Master:
		in.Trainer = in.Trainer.Mixed(in.Precision, xpu.BFloat16)
	case in.Trainer.Own && in.Trainer.Master && in.Precision != configured:
		return in, usagef("--precision %s contradicts precision: %s of --config", in.Precision, configured)
	}
	if l.Activations == xpu.BFloat16 && !in.Trainer.Own {
		return in, usagef("--activations %s needs --trainer %s", l.Activations, estimate.Mula.Name)
	}
	if tp := l.Size(comm.TP); tp > 1 && !in.Trainer.Own {
		return in, usagef("--layout tp=%d needs --trainer %s", tp, estimate.Mula.Name)
	}
	if l.SequenceRanks > 1 && !in.Trainer.Own {
		return in, usagef("--layout cp=%d needs --trainer %s", l.SequenceRanks, estimate.Mula.Name)
	}
	switch kind := c.String("collectives"); {
	case kind == flat && !in.Trainer.Own:
		return in, usagef("--collectives flat needs --trainer %s", estimate.Mula.Name)
	default:
		in.Flat = kind == flat
	}
	return in, nil
}

// parseLayout reads expert_dp=256,ep=12 into a layout. It returns a warning for an old name.
func parseLayout(text string, l *estimate.Layout) (warnings []string, err error) {
	if text == "" {
		return nil, nil
	}
	axes := map[string]comm.Axes{}
	for _, axis := range comm.AllAxes() {
		axes[axis.String()] = axis
	}
	others := map[string]*int{"sum_replicas": &l.SumReplicas, "cp": &l.SequenceRanks,
		"virtual_stages": &l.VirtualStages} // that are not axes
	for name := range others {
		axes[name] = 0
	}
	for _, part := range strings.Split(text, ",") {
		name, value, ok := strings.Cut(strings.TrimSpace(part), "=")
		if name == "dp" {
			name, warnings = "expert_dp", []string{"dp in --layout is now called expert_dp"}
		}
		axis, known := axes[name]
		n, err := strconv.Atoi(value)
		if !ok || !known || err != nil || n < 1 || n > 1<<24 {
			return nil,
				usagef("--layout: must be like expert_dp=256,ep=12,pp=4, with whole numbers from 1 and each axis "+
					"at most once, got %q", text)
		}
		delete(axes, name)
		if axis == 0 {
			*others[name] = n
		} else {
			l.Shape = l.With(axis, n)
		}
	}
	return warnings, nil
}

// rankRange parses a range of ranks such as 384:12288.
func rankRange(text string) (from, to int, err error) {
	first, last, ok := strings.Cut(text, ":")
	from, err1 := strconv.Atoi(first)
	to, err2 := strconv.Atoi(last)
	if !ok || err1 != nil || err2 != nil || from < 1 || to < from || to > 1<<24 {
		return 0, 0, usagef("--scaling: must be like 384:12288, with the smaller number of ranks first, got %q", text)
	}
	return from, to, nil
}

func findMachine(c *cli.Context, ranks int) (estimate.Machine, error) {
	switch name := c.String("machine"); {
	case name == estimate.LocalName:
		return estimate.Local(c.Context, ranks, 0)
	case strings.HasSuffix(name, ".yaml") || strings.HasSuffix(name, ".yml"):
		m, err := estimate.LoadMachine(name)
		warnAbout(c, m)
		return m, err
	default:
		m, err := estimate.MachineByName(name)
		if err != nil {
			return m, usagef("--machine: %s", err)
		}
		return m, nil
	}
}

// estimateReport is the output of mula estimate.
type estimateReport struct {
	Results     []*estimate.Result     `json:"results"`
	Scaling     []estimate.Curve       `json:"scaling,omitempty"`
	Assumptions []estimate.Sensitivity `json:"assumptions"` // of the last result
}

// exchanges reports whether ranks of a layout exchange something for a purpose, or spend time on a
// part of a step; false only for purposes of sharing sequences or matrices.
func exchanges(l estimate.Layout, purpose string) bool {
	switch tensor := l.Size(comm.TP) > 1; estimate.Purpose(purpose) {
	case estimate.ForSequences:
		return l.SequenceRanks > 1 || tensor
	case estimate.ForTensor:
		return tensor
	}
	return true
}

func (e *estimateReport) write(w io.Writer) {
	r := e.Results[0]
	l := r.Layout
	fmt.Fprintf(w, "%s on %s: %s parameters, %s active; expert_dp %d × ep %d × pp %d = %s\n", r.Model, r.Machine.Name,
		quantity.Tokens(r.Parameters), quantity.Tokens(r.Active),
		l.Size(comm.ExpertDP), l.Size(comm.EP), l.Size(comm.PP), quantity.Plural(int64(l.Ranks()), "rank"))
	if tp := l.Size(comm.TP); tp > 1 {
		fmt.Fprintf(w, "tensor parallelism: tp %d, ranks that share matrices and the tokens of sequences\n", tp)
	}
	if l.SequenceRanks > 1 {
		fmt.Fprintf(w, "context parallelism: %d data ranks share each sequence", l.SequenceRanks)
		if heads := r.Config.HeadRanks(l.SequenceRanks, l.Size(comm.TP)); heads < l.SequenceRanks {
			fmt.Fprintf(w, "; %d parts of its queries, heads divided among %s", l.SequenceRanks/heads,
				quantity.Plural(int64(heads), "rank"))
		}
		fmt.Fprintln(w)
	}
	fmt.Fprintf(w,
		"step: %s sequences of %s = %s tokens; sequences per data rank: %d, %d at a time; dispatch %s; recompute %s\n",
		quantity.Grouped(int64(l.BatchSize)), quantity.Plural(int64(l.SequenceLength), "token"),
		quantity.Tokens(int64(l.BatchSize)*int64(l.SequenceLength)), l.Sequences(), min(l.Sequences(),
			l.MicroBatchSize),
		l.Dispatch, l.Recompute)
	t := r.Trainer
	master := ""
	if t.Master {
		master = ", including a master copy"
	}
	stored := ""
	if n := t.Accumulated; n > 0 && n != t.Gradients {
		stored = fmt.Sprintf(", %d in memory", n)
	}
	activations := fmt.Sprint(t.Activations)
	if l.Activations == xpu.BFloat16 {
		activations += fmt.Sprintf(" (%d of the largest)", l.Activations.Bytes())
	}
	fmt.Fprintf(w, "bytes per element of %s: weight %d, gradient %d (both also in traffic)%s, optimizer state %d%s, "+
		"activation %s; products in %s\n\n", t.Name, t.Weights, t.Gradients, stored, t.State, master,
		activations, r.Precision)

	heading := []string{"per rank"}
	for _, r := range e.Results {
		heading = append(heading, string(r.Layout.Optimizer))
	}
	one := newTable(heading...)
	add := func(name string, of func(*estimate.Result) string) {
		row := []any{name}
		for _, r := range e.Results {
			row = append(row, of(r))
		}
		one.row(row...)
	}
	size := func(name string, of func(*estimate.Result) float64) {
		add(name, func(r *estimate.Result) string { return quantity.Bytes(int64(of(r) + 0.5)) })
	}
	size("memory: weights", func(r *estimate.Result) float64 { return float64(r.Memory.Weights) })
	size("memory: gradients", func(r *estimate.Result) float64 { return float64(r.Memory.Gradients) })
	size("memory: optimizer", func(r *estimate.Result) float64 { return float64(r.Memory.Optimizer) })
	size("memory: activations", func(r *estimate.Result) float64 { return float64(r.Memory.Activations) })
	size("memory: exchange", func(r *estimate.Result) float64 { return float64(r.Memory.Exchange) })
	if l.Background {
		size("memory: checkpoint", func(r *estimate.Result) float64 { return float64(r.Memory.Checkpoint) })
	}
	if l.SnapshotCopies > 0 {
		size("memory: snapshots", func(r *estimate.Result) float64 { return float64(r.Memory.Snapshots) })
	}
	size("memory: total", func(r *estimate.Result) float64 { return float64(r.Memory.Total()) })
	add("weights updated per step", func(r *estimate.Result) string { return quantity.Tokens(int64(r.Stepped + 0.5)) })
	add("work per step, TFLOP", func(r *estimate.Result) string { return fmt.Sprintf("%.4g", r.FLOPs/1e12) })
	add("work of the busiest rank, TFLOP", func(r *estimate.Result) string {
		return fmt.Sprintf("%.4g", r.Computed/1e12)
	})
	for _, p := range []estimate.Purpose{estimate.ForDispatch, estimate.ForSequences, estimate.ForTensor,
		estimate.ForPipeline, estimate.ForEmbeddings, estimate.ForGradients, estimate.ForUpdate, estimate.ForWeights,
		estimate.ForVotes} {
		rare := p == estimate.ForUpdate || p == estimate.ForEmbeddings
		if !exchanges(l, string(p)) || rare && r.Sent(p) == 0 {
			continue
		}
		size("sent per step: "+string(p), func(r *estimate.Result) float64 { return r.Sent(p) })
	}
	size("sent per step: total", func(r *estimate.Result) float64 { return r.Sent() })
	if l.SnapshotCopies > 1 {
		size("sent per snapshot, at most", func(r *estimate.Result) float64 {
			return float64(r.Memory.Snapshots) / float64(2*l.SnapshotCopies)
		})
	}
	size("received per step: votes", func(r *estimate.Result) float64 { return float64(r.Received) })
	for _, part := range estimate.Parts() {
		if !exchanges(l, part.Name) {
			continue
		}
		add("seconds: "+part.Name, func(r *estimate.Result) string { return fmt.Sprintf("%.4g", part.Of(r.Time)) })
	}
	add("seconds: step", func(r *estimate.Result) string { return fmt.Sprintf("%.4g", r.StepTime) })
	if t.Own {
		add("gradients during the backward pass, seconds", func(r *estimate.Result) string {
			return fmt.Sprintf("%.4g", r.Time.Hidden)
		})
	}
	add("tokens/s", func(r *estimate.Result) string {
		return quantity.Tokens(int64(r.TokensPerSecond / float64(r.Layout.Ranks())))
	})
	add("tokens/s, all ranks", func(r *estimate.Result) string { return quantity.Tokens(int64(r.TokensPerSecond)) })
	add("MFU", func(r *estimate.Result) string { return quantity.FixedPercent(r.MFU, 2) })
	if r.Checkpoint != nil {
		size("checkpoint", func(r *estimate.Result) float64 { return float64(r.Checkpoint.Bytes) })
		add("checkpoint: seconds to write", func(r *estimate.Result) string {
			return fmt.Sprintf("%.4g", r.Checkpoint.Write)
		})
		add("checkpoint: seconds to load", func(r *estimate.Result) string {
			return fmt.Sprintf("%.4g", r.Checkpoint.Load)
		})
	}
	one.write(w)
	for _, r := range e.Results {
		if !r.Fits {
			fmt.Fprintf(w, "%s: needs %s, but a rank has %s of memory\n", r.Layout.Optimizer,
				quantity.Bytes(r.Memory.Total()),
				quantity.Bytes(int64(r.Machine.Memory.Value)))
		}
	}

	for _, r := range e.Results {
		fmt.Fprintf(w, "\nExchanges per step with %s\n", r.Layout.Optimizer)
		exchanges := newTable("for", "operation", "group", "ranks", "calls", "sent per rank")
		for _, x := range r.Traffic {
			exchanges.row(string(x.Purpose), x.Name, x.Group.GroupName(), x.Ranks, x.Calls,
				quantity.Bytes(int64(x.PerRank()+0.5)))
		}
		if len(r.Traffic) == 0 {
			fmt.Fprintln(w, "none")
		} else {
			exchanges.write(w)
		}
	}

	for _, curve := range e.Scaling {
		fmt.Fprintf(w, "\nScaling with %s\n", curve.Scheme)
		scaling := newTable("ranks", "expert_dp", "sequences", "seconds", "tokens/s", "tokens/s per rank", "MFU",
			"efficiency")
		for _, p := range curve.Points {
			scaling.row(p.Ranks, p.DP, p.BatchSize, p.StepTime, quantity.Tokens(int64(p.TokensPerSecond)),
				p.TokensPerSecond/float64(p.Ranks), quantity.FixedPercent(p.MFU, 2),
				quantity.FixedPercent(p.Efficiency, 1))
		}
		scaling.write(w)
	}

	last := e.Results[len(e.Results)-1]
	fmt.Fprintf(w, "\nAssumptions, and the step time with %s if each is 20 %% off (now %.4g s)\n",
		last.Layout.Optimizer, last.StepTime)
	heading = []string{"figure", "value", "20 % less", "20 % more"}
	if len(e.Scaling) > 0 {
		heading = append(heading, "efficiency at 20 % less", "at 20 % more")
	}
	assumed := newTable(append(heading, "why")...)
	for _, s := range e.Assumptions {
		row := []any{s.Figure, s.Value, s.Less.StepTime, s.More.StepTime}
		if len(e.Scaling) > 0 {
			row = append(row, quantity.FixedPercent(s.Less.Efficiency, 1),
				quantity.FixedPercent(s.More.Efficiency, 1))
		}
		assumed.row(append(row, s.Why)...)
	}
	assumed.write(w)
	if last.Trainer.Own && l.Ranks() > 1 {
		fmt.Fprintln(w, "Not included: on a GPU, gradients, weights and tokens for other ranks pass through the "+
			"host, which sums the gradients.")
	}
	if f := last.Machine.FileSystem; last.Checkpoint != nil {
		fmt.Fprintf(w, "The times of a checkpoint rest on file_system, %s/s (%s): %s.\n",
			quantity.Bytes(int64(f.Value)), f.Kind, f.Source)
	}
	also := "Also assumed: tokens are distributed evenly over experts, "
	if !last.Trainer.Own {
		also += "nothing overlaps, "
	}
	fmt.Fprintln(w, also+"and in a run over several groups of nodes every group receives the same traffic.")
}

func printPublished(c *cli.Context) error {
	for _, name := range []string{"model", "config", "set", "layout", "machine", "scaling", "compare", "plot",
		"collectives"} {
		if c.IsSet(name) {
			return usagef("--published has the settings of the Mula runs on Aurora; remove --%s", name)
		}
	}
	all, err := estimate.ComparePublished()
	if err != nil {
		return err
	}
	if c.Bool("json") {
		return printJSON(c.App.Writer, all)
	}
	t := newTable("model", "what", "published", "estimated", "why")
	for _, x := range all {
		published := "-"
		if x.Published != 0 {
			published = fmt.Sprintf("%.3g", x.Published)
		}
		t.row(x.Model, x.What, published, fmt.Sprintf("%.4g", x.Estimated), x.Why)
	}
	t.write(c.App.Writer)
	fmt.Fprintln(c.App.Writer, "Published: https://arxiv.org/abs/2604.00785; the speed-ups come from reading notes "+
		"on that paper, the layouts from its code. Byte sizes are the sizes of optimus.")
	return nil
}
