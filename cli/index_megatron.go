package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/blend"
	"mula/index/cache"
	"mula/index/gpt"
	"mula/index/megatron"
	"mula/index/python"
	"mula/index/rebuild"
	"mula/internal/atomicfile"
	"mula/internal/objects"
	"mula/internal/quantity"
)

// maxWords is the maximum number of bytes of a file with the words of --data-path.
const maxWords = 64 << 20

// megatronBuild is an index of Megatron-LM.
type megatronBuild struct {
	config megatron.Config
	index  *megatron.Index

	list     string   // file with the words of --data-path, "" if the words are in the flag
	fromYAML bool     // mula writes that file
	given    []string // flags that are also flags of Megatron-LM
}

// megatronIndex reads the flags of --for megatron.
func megatronIndex(c *cli.Context) (foreignIndex, error) {
	config := megatron.NewConfig()
	var err error
	if config.Profile, err = megatron.ProfileNamed(c.String("profile")); err != nil {
		return nil, usagef("--profile: %v", err)
	}
	if config.Arithmetic, err = megatron.ParseArithmetic(c.String("arithmetic")); err != nil {
		return nil, usagef("--arithmetic: %v", err)
	}
	config.Cache, config.Root, config.Threads = c.String("cache"), c.String("root"), threads(c)
	config.ExtraToken, config.KeepPartialValidation = c.Bool("extra-token"), c.Bool("keep-partial-validation")
	config.RenormalizeBlendWeights, config.Surplus = c.Bool("renormalize-blend-weights"), c.Float64("surplus")
	if err := megatronTokenizer(c, &config); err != nil {
		return nil, err
	}
	if c.IsSet("split") {
		config.Split = c.String("split")
	}
	if c.IsSet("seq-length") {
		config.SequenceLength = c.Int64("seq-length")
	}
	if c.IsSet("seed") {
		seed, err := seedFlag(c)
		if err != nil {
			return nil, err
		}
		config.Seed = seed
	}
	if err := megatronBlend(c, &config); err != nil {
		return nil, err
	}
	if config.SequenceLength < 1 {
		return nil, usagef("--seq-length is required, and must be at least 1")
	}
	if err := megatronSizes(c, &config); err != nil {
		return nil, err
	}
	if config.Cache == "" && slices.ContainsFunc(config.Prefixes(), func(prefix string) bool {
		return objects.IsURL(gpt.Locate(config.Root, prefix))
	}) {
		return nil, usagef("--cache is required, because token files are in an object store")
	}
	x, err := megatron.New(c.Context, config)
	if err != nil {
		return nil, err
	}
	m := &megatronBuild{config: config, index: x, list: c.String("data-args-path"), given: givenFlags(c)}
	if c.IsSet("config") {
		m.list, m.fromYAML = filepath.Join(config.Cache, "data-args.txt"), true
	}
	return m, nil
}

// seedFlag reads --seed of a framework that seeds numpy's legacy generator.
func seedFlag(c *cli.Context) (uint32, error) {
	seed := c.Int64("seed")
	if seed < 0 || seed > 1<<32-1 {
		return 0, usagef("--seed is %d; it must be from 0 to %d", seed, int64(1<<32-1))
	}
	return uint32(seed), nil
}

// megatronTokenizer reads the tokenizer object, which is part of the hash in every name.
func megatronTokenizer(c *cli.Context, config *megatron.Config) error {
	var given []string
	for _, name := range []string{"tokenizer-json", "tokenizer-path", "like"} {
		if c.IsSet(name) {
			given = append(given, "--"+name)
		}
	}
	if len(given) > 1 {
		return usagef("%s exclude each other; use one of them", strings.Join(given, " and "))
	}
	switch {
	case c.IsSet("tokenizer-json"):
		text, err := readSmall(c.String("tokenizer-json"))
		if err != nil {
			return err
		}
		if config.Tokenizer, err = python.Parse(text); err != nil {
			return fmt.Errorf("%s: %w", c.String("tokenizer-json"), err)
		}
		if err := checkTokenizer(config.Tokenizer); err != nil {
			return fmt.Errorf("%s: %w", c.String("tokenizer-json"), err)
		}
	case c.IsSet("tokenizer-path"):
		var err error
		if config.Tokenizer, err = megatron.HuggingFaceTokenizer(c.String("profile"), c.String("tokenizer-path"),
			false); err != nil {
			return usagef("--tokenizer-path: %v", err)
		}
	case c.IsSet("like"):
		like, err := megatron.ReadLike(c.String("like"))
		if err != nil {
			return err
		}
		config.Tokenizer, config.SequenceLength, config.Seed = like.Tokenizer, like.SequenceLength, like.Seed
		if like.Split != "" {
			config.Split = like.Split
		}
		if !c.IsSet("profile") && len(like.Profiles) > 0 {
			config.Profile = like.Profiles[len(like.Profiles)-1]
		}
	case config.Profile.Name() != "core-0.4":
		return usagef("the tokenizer is required, because it is part of every name; use --like FILE (a " +
			"description.txt of " +
			"your Megatron-LM, the safest choice), --tokenizer-path or --tokenizer-json")
	}
	return nil
}

// checkTokenizer refuses values that are not a tokenizer object of Megatron-LM, such as similar
// files.
func checkTokenizer(v python.Value) error {
	o, _ := v.(python.Object)
	class, ok := o.Get("class").(python.String)
	switch {
	case !ok:
		return errors.New("not a tokenizer object, which starts with a class, " +
			"such as " +
			`{"class": "_HuggingFaceTokenizer", "tokenizer_path": ["/models/x"]}; for a Hugging Face tokenizer, pass its path with --tokenizer-path`)
	case class == "GPTDataset" || class == "BlendedDataset":
		return errors.New("this is a complete description; pass it with --like")
	}
	return nil
}

// readSmall reads a small file into memory.
func readSmall(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, maxWords+1))
	if err != nil {
		return nil, err
	}
	if len(text) > maxWords {
		return nil, fmt.Errorf("%s has more than %s", path, quantity.Bytes(maxWords))
	}
	return text, nil
}

// flagWords returns the words of a flag that may be repeated.
func flagWords(c *cli.Context, name string) []string {
	return strings.Fields(strings.Join(c.StringSlice(name), " "))
}

// dataPath reads the words of a flag that names a blend.
func dataPath(c *cli.Context, name string) (megatron.Blend, error) {
	blend, err := megatron.ParseBlend(flagWords(c, name))
	if err != nil {
		return blend, usagef("--%s: %v", name, err)
	}
	return blend, nil
}

func megatronBlend(c *cli.Context, config *megatron.Config) error {
	per := []string{"train-data-path", "valid-data-path", "test-data-path"}
	var ways []string
	for _, name := range append([]string{"data-path", "data-args-path", "config"}, per...) {
		if c.IsSet(name) && !(slices.Contains(per, name) && len(ways) > 0 && slices.Contains(per, ways[len(ways)-1])) {
			ways = append(ways, name)
		}
	}
	switch {
	case len(ways) == 0:
		return usagef("no data; use --data-path, --data-args-path, --train-data-path and similar, or --config")
	case len(ways) > 1:
		return usagef("--%s and --%s exclude each other; use one of them", ways[0], ways[1])
	}
	var err error
	switch ways[0] {
	case "config":
		return megatronConfig(c, config)
	case "data-path":
		config.Blend, err = dataPath(c, "data-path")
		return err
	case "data-args-path":
		path := c.String("data-args-path")
		text, err := readSmall(path)
		if err != nil {
			return err
		}
		if config.Blend, err = megatron.ParseBlend(strings.Fields(string(text))); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		return nil
	}
	if c.IsSet("split") {
		return usagef("--split cannot be combined with --%s, where each split has its own files", ways[0])
	}
	config.Split = ""
	for i, name := range per {
		if c.IsSet(name) {
			blend, err := dataPath(c, name)
			if err != nil {
				return err
			}
			config.PerSplit[i] = &blend
		}
	}
	return nil
}

// megatronSizes reads the numbers of requested samples, or computes them from the steps of a run.
func megatronSizes(c *cli.Context, config *megatron.Config) error {
	samples := []string{"train-samples", "valid-samples", "test-samples"}
	if c.IsSet("train-iters") || c.IsSet("global-batch-size") || c.IsSet("eval-iters") || c.IsSet("eval-interval") {
		for _, name := range samples[1:] {
			if c.IsSet(name) {
				return usagef("--%s follows from --eval-iters and --global-batch-size; remove one of them",
					name)
			}
		}
		for _, name := range []string{"global-batch-size", "eval-iters", "eval-interval"} {
			if !c.IsSet(name) {
				return usagef("--%s is required with the steps of a run: the number of samples is part of "+
					"every name, and Megatron-LM's default differs between releases. "+
					"Set it to the value of Megatron-LM; 0 disables it", name)
			}
		}
		schedule := megatron.Schedule{TrainIters: c.Int64("train-iters"), GlobalBatchSize: c.Int64("global-batch-size"),
			EvalInterval: c.Int64("eval-interval"), EvalIters: c.Int64("eval-iters")}
		if c.IsSet("train-samples") {
			n, err := sizeFlag(c, "train-samples")
			if err != nil {
				return err
			}
			schedule.TrainSamples = n.N
		}
		var err error
		if config.Samples, err = schedule.Samples(); err != nil {
			return usagef("%v (--train-iters or --train-samples, --global-batch-size, --eval-interval, --eval-iters)",
				err)
		}
		return nil
	}
	for i, name := range samples {
		if !c.IsSet(name) {
			if config.Samples[i].Given {
				continue // by --config
			}
			if wanted(config, i) {
				return usagef("--%s is required: the number of samples that Megatron-LM requests is part of every "+
					"name. Set it to a number or none, or set --train-iters, --global-batch-size, --eval-interval "+
					"and --eval-iters", name)
			}
			continue
		}
		n, err := sizeFlag(c, name)
		if err != nil {
			return err
		}
		config.Samples[i] = n
	}
	return nil
}

// wanted reports whether files of split i will be built.
func wanted(config *megatron.Config, i int) bool {
	for _, b := range config.PerSplit {
		if b != nil {
			return config.PerSplit[i] != nil
		}
	}
	return true
}

// noSamples is the value of --train-samples and its siblings for one epoch of all data.
const noSamples = "none"

func sizeFlag(c *cli.Context, name string) (megatron.Size, error) {
	text := c.String(name)
	if text == noSamples {
		return megatron.Size{}, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 {
		return megatron.Size{}, usagef("--%s is %q; it must be a number of samples, or none", name, text)
	}
	return megatron.SizeOf(n), nil
}

func (m *megatronBuild) entries(ctx context.Context) ([]rebuild.Entry, error) {
	return m.index.Describe(ctx, true)
}

func (m *megatronBuild) build(ctx context.Context, o rebuild.BuildOptions) (cache.Summary, error) {
	summary, err := m.index.Build(ctx, o)
	if err == nil && m.fromYAML {
		err = atomicfile.WriteFile(m.list, []byte(blendWords(m.config.Blend, "\n", strings.Clone)+"\n"))
	}
	return summary, err
}

// blendWords returns the words of a blend in the form of Megatron-LM. word writes a prefix.
func blendWords(b megatron.Blend, between string, word func(string) string) string {
	var words []string
	for i, prefix := range b.Prefixes {
		prefix = word(prefix)
		if b.Weights != nil {
			prefix = python.Float(b.Weights[i]) + " " + prefix
		}
		words = append(words, prefix)
	}
	return strings.Join(words, between)
}

// notes warns about files that Megatron-LM will not find.
func (m *megatronBuild) notes() []string {
	found, err := m.index.Describe(context.Background(), false)
	if err != nil {
		return nil
	}
	var notes []string
	first, bare := "", map[string]bool{}
	if slices.ContainsFunc(found, func(e rebuild.Entry) bool { return e.Dir == "" }) {
		notes = append(notes,
			"without --cache, only the indices of token files are written, next to these files; Megatron-LM then "+
				"computes blends at every start. "+
				"Set --cache here, and --data-cache-path of Megatron-LM to the same folder")
	}
	for _, e := range found {
		if e.Class != rebuild.DatasetClass {
			continue
		}
		if bin := gpt.Locate(m.config.Root, e.Prefixes[0]) + ".bin"; !objects.IsURL(bin) && !exists(bin) {
			if len(bare) == 0 {
				first = bin
			}
			bare[bin] = true
		}
	}
	if len(bare) > 0 {
		notes = append(notes, fmt.Sprintf("%s without .bin, the first is %s: only the .idx was read, but "+
			"Megatron-LM needs both",
			quantity.Plural(int64(len(bare)), "token file"), first))
	}
	return notes
}

func (m *megatronBuild) title() string {
	return fmt.Sprintf("Megatron-LM %s, %s arithmetic", m.config.Profile.Releases(), m.config.Arithmetic)
}

// start returns the arguments with which Megatron-LM finds the files: all arguments on which the
// names or contents depend.
func (m *megatronBuild) start() string {
	var b strings.Builder
	per := false
	for i, flag := range []string{"train-data-path", "valid-data-path", "test-data-path"} {
		if x := m.config.PerSplit[i]; x != nil {
			fmt.Fprintf(&b, "--%s %s ", flag, blendWords(*x, " ", shellWord))
			per = true
		}
	}
	if !per {
		if m.list != "" {
			fmt.Fprintf(&b, "--data-args-path %s ", shellWord(m.list))
		} else {
			fmt.Fprintf(&b, "--data-path %s ", blendWords(m.config.Blend, " ", shellWord))
		}
		fmt.Fprintf(&b, "--split=%s ", shellWord(m.config.Split))
	}
	fmt.Fprintf(&b, "--seq-length %d --seed %d", m.config.SequenceLength, m.config.Seed)
	for _, flag := range m.given {
		b.WriteString(" " + flag)
	}
	if m.config.Surplus != megatron.DefaultSurplus {
		fmt.Fprintf(&b, " --mid-level-dataset-surplus %s", python.Float(m.config.Surplus))
	}
	if m.config.Cache != "" {
		fmt.Fprintf(&b, " --data-cache-path %s", shellWord(m.config.Cache))
	}
	return b.String()
}

// givenFlags returns mula's flags for numbers of samples and the tokenizer, in the form of
// Megatron-LM.
func givenFlags(c *cli.Context) []string {
	var flags []string
	for _, name := range []string{"train-iters", "global-batch-size", "eval-interval", "eval-iters"} {
		if c.IsSet(name) {
			flags = append(flags, fmt.Sprintf("--%s %d", name, c.Int64(name)))
		}
	}
	if c.IsSet("train-samples") && c.String("train-samples") != noSamples {
		flags = append(flags, "--train-samples "+c.String("train-samples"))
	}
	if path := c.String("tokenizer-path"); path != "" {
		flags = append(flags, "--tokenizer-type HuggingFaceTokenizer --tokenizer-model "+shellWord(path))
	}
	return flags
}

// asks describes the requests that the framework must make because of arguments that mula does not
// have.
func (m *megatronBuild) asks() string {
	var parts []string
	for i, n := range m.config.Samples {
		if wanted(&m.config, i) {
			parts = append(parts, fmt.Sprintf("%s %s", rebuild.Split(i), n))
		}
	}
	text := "Its own settings must request these samples: " + strings.Join(parts, ", ")
	if !m.config.ExtraToken {
		text += "; and without the extra token (add_extra_token_to_sequence=False)"
	}
	if m.config.KeepPartialValidation {
		text += "; and keep the last, partial sample of validation"
	}
	return text
}

// shellWord quotes a word for a shell if it needs it.
func shellWord(s string) string {
	if s != "" && strings.IndexFunc(s, func(r rune) bool {
		return !strings.ContainsRune("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789,._-/+=:@%", r)
	}) < 0 {
		return s
	}
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// megatronConfig reads --config, a blend.yaml.
func megatronConfig(c *cli.Context, config *megatron.Config) error {
	for _, name := range []string{"split", "seq-length", "seed"} {
		if c.IsSet(name) {
			return usagef("--%s follows from --config; remove one of them", name)
		}
	}
	if config.Cache == "" {
		return usagef("--cache is required with --config")
	}
	read, err := blend.LoadConfig(c.String("config"))
	if err != nil {
		return err
	}
	warnAbout(c, read)
	if *config, err = blend.ForMegatron(c.Context, read, *config); err != nil {
		return err
	}
	for _, prefix := range config.Blend.Prefixes {
		if len(strings.Fields(prefix)) != 1 {
			return fmt.Errorf("%s: shard %q has a space in its path, and Megatron-LM splits "+
				"--data-path at spaces; rename or link it", c.String("config"), prefix)
		}
	}
	return nil
}
