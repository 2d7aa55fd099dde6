package cli

import (
	"context"
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/index/blendcorpus"
	"mula/index/cache"
	"mula/index/megatron"
	"mula/index/rebuild"
	"mula/internal/quantity"
)

// blendCorpusBuild is an index of BlendCorpus or Megatron-DeepSpeed.
type blendCorpusBuild struct {
	config blendcorpus.Config
	index  *blendcorpus.Index
	list   string   // --file-list
	words  []string // or --data-path
	given  []string // flags that are also flags of the program
}

// blendCorpusIndex reads the flags of --for blendcorpus and --for megatron-deepspeed.
func blendCorpusIndex(c *cli.Context) (foreignIndex, error) {
	profile, err := blendcorpus.ProfileNamed(c.String("for"))
	if err != nil {
		return nil, usagef("--for: %v", err)
	}
	if err := needFlags(c, "cache"); err != nil {
		return nil, err
	}
	config := blendcorpus.NewConfig(profile)
	arithmetic, err := megatron.ParseArithmetic(c.String("arithmetic"))
	if err != nil {
		return nil, usagef("--arithmetic: %v", err)
	}
	config.Fused = arithmetic == megatron.Fused
	config.Cache, config.Root, config.Threads = c.String("cache"), c.String("root"), threads(c)
	config.BlendSampleInCorpus, config.ShuffleSampleInCorpus = c.Bool("blend-sample-in-corpus"),
		c.Bool("shuffle-sample-in-corpus")
	config.ExactEpochs = c.Int64("exact-epochs")
	config.AllowUnreadable = c.Bool("allow-unreadable")
	if c.IsSet("split") {
		config.Split = c.String("split")
	}
	if c.IsSet("seed") {
		if config.Seed, err = seedFlag(c); err != nil {
			return nil, err
		}
	}
	if config.SequenceLength = c.Int64("seq-length"); config.SequenceLength < 1 {
		return nil, usagef("--seq-length is required, and must be at least 1")
	}
	for _, name := range []string{"global-batch-size", "train-iters", "eval-iters"} {
		if !c.IsSet(name) {
			return nil, usagef("--%s is required: the number of samples is part of every name", name)
		}
	}
	evaluations := int64(1)
	switch {
	case profile == blendcorpus.BlendCorpus && c.IsSet("eval-interval"):
		return nil, usagef("--eval-interval has no effect for BlendCorpus, which requests the samples of one " +
			"evaluation; remove it")
	case profile == blendcorpus.MegatronDeepSpeed && c.Int64("eval-interval") < 1:
		return nil, usagef("--eval-interval is required: Megatron-DeepSpeed requests the validation samples of all " +
			"evaluations (its own default is 1000)")
	case profile == blendcorpus.MegatronDeepSpeed:
		evaluations = c.Int64("train-iters")/c.Int64("eval-interval") + 1
	}
	if config.Samples, err = blendcorpus.Requests(c.Int64("global-batch-size"), c.Int64("train-iters"),
		c.Int64("eval-iters"), evaluations); err != nil {
		return nil, usagef("%v", err)
	}
	path := c.String("file-list")
	switch {
	case c.IsSet("data-path") == (path != ""):
		return nil, usagef("no data; use --file-list (lines of weight, prefix and corpus) or " +
			"--data-path (weights and prefixes, for a flat blend)")
	case path != "":
		text, err := readSmall(path)
		if err != nil {
			return nil, err
		}
		if config.Files, err = blendcorpus.ParseFileList(string(text)); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
	default:
		if config.Files, config.Plain, err = blendcorpus.ParseDataPath(flagWords(c, "data-path")); err != nil {
			return nil, usagef("--data-path: %v", err)
		}
	}
	x, err := blendcorpus.New(c.Context, config)
	if err != nil {
		return nil, err
	}
	return &blendCorpusBuild{config, x, path, flagWords(c, "data-path"), givenFlags(c)}, nil
}

func (b *blendCorpusBuild) entries(context.Context) ([]rebuild.Entry, error) {
	return b.index.Describe(), nil
}

func (b *blendCorpusBuild) build(ctx context.Context, o rebuild.BuildOptions) (cache.Summary, error) {
	return b.index.Build(ctx, o)
}

// notes warns about other files that the program would read instead.
func (b *blendCorpusBuild) notes() []string {
	var first string
	n := 0
	for _, e := range b.index.Describe() {
		if e.Shadow != "" {
			if n++; n == 1 {
				first = e.Shadow
			}
		}
	}
	if n == 0 {
		return nil
	}
	return []string{fmt.Sprintf("%s with these names are also in folders next to the token files (the first is %s), "+
		"which the program reads before --data-cache-path; remove them unless they are correct",
		quantity.Plural(int64(n), "set"), first)}
}

func (b *blendCorpusBuild) title() string {
	name := "BlendCorpus"
	if b.config.Profile == blendcorpus.MegatronDeepSpeed {
		name = "Megatron-DeepSpeed"
	}
	arithmetic := megatron.Separate
	if b.config.Fused {
		arithmetic = megatron.Fused
	}
	return fmt.Sprintf("%s, %s arithmetic", name, arithmetic)
}

// start returns the arguments with which the program finds the files.
func (b *blendCorpusBuild) start() string {
	files := "--data-file-list " + shellWord(b.list)
	if b.list == "" {
		files = "--data-path " + strings.Join(b.words, " ")
	}
	given := strings.Join(b.given, " ")
	if b.config.ExactEpochs > 0 {
		given += fmt.Sprintf(" --train-data-exact-num-epochs %d", b.config.ExactEpochs)
	}
	return fmt.Sprintf("%s --split=%s --seq-length %d --seed %d %s --data-cache-path %s", files,
		shellWord(b.config.Split), b.config.SequenceLength, b.config.Seed,
		given, shellWord(b.config.Cache))
}

// asks names settings that are not arguments of the program.
func (b *blendCorpusBuild) asks() string {
	if b.config.Profile == blendcorpus.MegatronDeepSpeed {
		return ""
	}
	return fmt.Sprintf("with blend_sample_in_corpus %v and shuffle_sample_in_corpus %v", b.config.BlendSampleInCorpus,
		b.config.ShuffleSampleInCorpus)
}
