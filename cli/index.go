package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"mula/index/cache"
	"mula/index/olmo"
	"mula/index/rebuild"
	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/filesystem/objectfs"
	"mula/internal/launchers"
	"mula/internal/machine"
	"mula/internal/objects"
	"mula/internal/quantity"
)

// The frameworks that `mula index` writes for.
const (
	forMegatron    = "megatron"
	forDeepSpeed   = "megatron-deepspeed"
	forBlendCorpus = "blendcorpus"
	forOLMo        = "olmo"
)

var frameworks = []string{forMegatron, forDeepSpeed, forBlendCorpus, forOLMo}

// indexTargets lists the flags of each framework, in addition to the flags of all frameworks.
var indexTargets = map[string][]string{
	forMegatron: {"config", "data-path", "data-args-path", "train-data-path", "valid-data-path", "test-data-path",
		"split", "seq-length", "seed",
		"train-samples", "valid-samples", "test-samples", "train-iters", "global-batch-size", "eval-interval",
		"eval-iters",
		"extra-token", "keep-partial-validation", "surplus", "renormalize-blend-weights", "tokenizer-json",
		"tokenizer-path", "like", "profile",
		"arithmetic", "root"},
	forBlendCorpus: {"file-list", "data-path", "eval-interval", "allow-unreadable", "split", "seq-length", "seed",
		"train-iters", "global-batch-size", "eval-iters", "blend-sample-in-corpus",
		"shuffle-sample-in-corpus", "exact-epochs", "arithmetic", "root"},
	forOLMo: {"plan", "global-batch-size", "paths", "dtype", "seq-length", "max-target-sequence-length",
		"source-permutation-seed", "seed", "epoch",
		"vocab-size", "eos-token-id", "pad-token-id", "bos-token-id"},
}

func init() { indexTargets[forDeepSpeed] = indexTargets[forBlendCorpus] }

func indexCommand() *cli.Command {
	return &cli.Command{
		Name:  "index",
		Usage: "build the index files of Megatron-LM, BlendCorpus or OLMo-core, byte for byte",
		Description: "The framework, started with the same settings, finds its cache and builds nothing. Flags have " +
			"the framework's names.\n" +
			"Several processes, on several machines, may build one cache at once: they share the work. After a " +
			"kill, the same command\n" +
			"resumes the build.\n\n" +
			"Example: mula index --for megatron --data-path \"0.7 data/web 0.3 data/code\" --split 99,1,0 " +
			"--seq-length 4096 \\\n" +
			"           --train-samples 1000000 --valid-samples 10000 --test-samples 0 --like old/…-description.txt " +
			"--cache cache\n" +
			"         mpiexec -n 8 mula index … (or srun): the ranks share the work; rank 0 prints\n" +
			"         mula index verify cache",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "for",
				Usage: "build for `FRAMEWORK`: " + anyOf(frameworks) + " (required)"},
			&cli.StringFlag{Name: "cache",
				Usage: "write the files to `DIR` (--data-cache-path; work_dir of OLMo-core); may be a URL of an " +
					"object store"},
			&cli.StringFlag{Name: "work",
				Usage: "if --cache is a URL, keep files that are being written in the local folder `DIR`"},
			&cli.IntFlag{Name: "threads", Usage: "compute on `N` cores; 0: all"},
			&cli.BoolFlag{Name: "dry-run", Usage: "print names, sizes and the estimated time, and write nothing"},
			&cli.BoolFlag{Name: "resume",
				Usage: "keep complete files in DIR; --resume=false rebuilds all", Value: true},
			jsonFlag,

			&cli.StringSliceFlag{Name: "data-path", Category: "Megatron-LM",
				Usage: "blend of token files: `BLEND` is \"W PREFIX W PREFIX …\" or prefixes alone, as in " +
					"Megatron-LM; words are split at spaces"},
			&cli.StringFlag{Name: "data-args-path", Category: "Megatron-LM",
				Usage: "read the words of --data-path from `FILE`"},
			&cli.StringSliceFlag{Name: "train-data-path", Category: "Megatron-LM",
				Usage: "`BLEND` of the training split, instead of --data-path and --split"},
			&cli.StringSliceFlag{Name: "valid-data-path", Category: "Megatron-LM", Usage: "`BLEND` of this split"},
			&cli.StringSliceFlag{Name: "test-data-path", Category: "Megatron-LM", Usage: "`BLEND` of this split"},
			&cli.StringFlag{Name: "config", Category: "Megatron-LM",
				Usage: "read sources, weights, sequence length, seed and sizes from the blend.yaml `FILE`"},
			&cli.StringFlag{Name: "train-samples", Category: "Megatron-LM",
				Usage: "request `N` samples, or none for one epoch of all data"},
			&cli.StringFlag{Name: "valid-samples", Category: "Megatron-LM", Usage: "request `N` samples, or none"},
			&cli.StringFlag{Name: "test-samples", Category: "Megatron-LM", Usage: "request `N` samples, or none"},
			&cli.Int64Flag{Name: "eval-interval", Category: "Megatron-LM",
				Usage: "evaluate every `N` steps; computes the samples with --train-iters", DefaultText: "none"},
			&cli.BoolFlag{Name: "extra-token", Category: "Megatron-LM", Usage: "add_extra_token_to_sequence",
				Value: true},
			&cli.BoolFlag{Name: "keep-partial-validation", Category: "Megatron-LM",
				Usage: "drop_last_partial_validation_sequence=False"},
			&cli.Float64Flag{Name: "surplus", Category: "Megatron-LM", Usage: "--mid-level-dataset-surplus",
				Value: 0.005},
			&cli.BoolFlag{Name: "renormalize-blend-weights", Category: "Megatron-LM", Usage: "core 0.9 and 0.10 only"},
			&cli.StringFlag{Name: "tokenizer-json", Category: "Megatron-LM",
				Usage: "read the tokenizer object of the descriptions from `FILE`"},
			&cli.StringFlag{Name: "tokenizer-path", Category: "Megatron-LM",
				Usage: "use HuggingFaceTokenizer with the --tokenizer-model `PATH`; the profile has the rest of the " +
					"tokenizer object"},
			&cli.StringFlag{Name: "like", Category: "Megatron-LM",
				Usage: "read the tokenizer object from `FILE`, a description.txt of Megatron-LM, and also sequence " +
					"length, seed and split unless they are flags"},
			&cli.StringFlag{Name: "profile", Category: "Megatron-LM",
				Usage: "write for the `RELEASE` of Megatron core: core-0.4 to core-0.19, or core-main",
				Value: "core-0.19"},

			&cli.StringFlag{Name: "file-list", Category: "BlendCorpus, Megatron-DeepSpeed",
				Usage: "read lines of weight, prefix and corpus from `FILE`"},
			&cli.BoolFlag{Name: "blend-sample-in-corpus", Category: "BlendCorpus, Megatron-DeepSpeed",
				Usage: "blend the files of a corpus; false: read one after the other", Value: true},
			&cli.BoolFlag{Name: "shuffle-sample-in-corpus", Category: "BlendCorpus, Megatron-DeepSpeed",
				Usage: "same as the framework's flag; only changes names, because the shuffle is not stored"},
			&cli.BoolFlag{Name: "allow-unreadable", Category: "BlendCorpus, Megatron-DeepSpeed",
				Usage: "also build files that the framework builds but cannot read completely"},
			&cli.Int64Flag{Name: "exact-epochs", Category: "BlendCorpus, Megatron-DeepSpeed",
				Usage: "train_data_exact_num_epochs", DefaultText: "none"},

			&cli.StringFlag{Name: "plan", Category: "OLMo-core",
				Usage: "write the order of the plan in `FILE` for OLMo-core"},
			&cli.StringSliceFlag{Name: "paths", Category: "OLMo-core",
				Usage: "write OLMo-core's own order of the token `FILE`s, in the given sequence; may be repeated"},
			&cli.StringFlag{Name: "dtype", Category: "OLMo-core",
				Usage: "type of the token files: " + anyOf(olmo.DTypes()), Value: "uint16"},
			&cli.Int64Flag{Name: "max-target-sequence-length", Category: "OLMo-core",
				Usage: "max_target_sequence_length", DefaultText: "the sequence length"},
			&cli.Int64Flag{Name: "source-permutation-seed", Category: "OLMo-core", Usage: "source_permutation_seed",
				DefaultText: "none"},
			&cli.Int64Flag{Name: "vocab-size", Category: "OLMo-core",
				Usage:       "with the token ids below, print the dataset fingerprint that OLMo-core stores in checkpoints",
				DefaultText: "none"},
			&cli.Int64Flag{Name: "eos-token-id", Category: "OLMo-core", Usage: "as in the tokenizer configuration",
				DefaultText: "none"},
			&cli.Int64Flag{Name: "pad-token-id", Category: "OLMo-core", Usage: "as in the tokenizer configuration",
				DefaultText: "none"},
			&cli.Int64Flag{Name: "bos-token-id", Category: "OLMo-core",
				Usage: "as in the tokenizer configuration, if it has one", DefaultText: "none"},
			&cli.Int64Flag{Name: "epoch", Category: "OLMo-core", Usage: "write epoch `N`, from 1", Value: 1},

			&cli.Int64Flag{Name: "seq-length", Usage: "sequence length in tokens", DefaultText: "none"},
			&cli.Int64Flag{Name: "seed", Usage: "seed of the shuffles",
				DefaultText: "the framework's default: 1234, BlendCorpus 123, OLMo-core 0"},
			&cli.StringFlag{Name: "split", Usage: "shares of train, valid and test, `T,V,E`", Value: "969, 30, 1"},
			&cli.Int64Flag{Name: "train-iters", Usage: "training steps", DefaultText: "none"},
			&cli.Int64Flag{Name: "global-batch-size", Usage: "samples per step", DefaultText: "none"},
			&cli.Int64Flag{Name: "eval-iters", Usage: "steps per evaluation", DefaultText: "none"},
			&cli.StringFlag{Name: "arithmetic",
				Usage: "rounding of the framework's compiled helper: separate (x86-64) or fused (aarch64)",
				Value: "separate"},
			&cli.StringFlag{Name: "root", Usage: "resolve relative prefixes from `DIR`; names and hashes do not " +
				"change"},
		},
		Action:      runIndex,
		Subcommands: []*cli.Command{indexVerifyCommand()},
	}
}

func runIndex(c *cli.Context) error {
	target := c.String("for")
	if target == "" {
		return usagef("--for is required: %s", strings.Join(frameworks, ", "))
	}
	own := indexTargets[target]
	if err := atMost(c, maxThreads, "threads"); err != nil {
		return err
	}
	switch folder := c.String("cache"); {
	case !objects.IsURL(folder):
		if c.IsSet("work") {
			return usagef("--work requires a URL as --cache")
		}
		if err := reachable(folder); err != nil {
			return err
		}
	case c.IsSet("config"):
		return usagef("--cache is a URL, which is not supported with --config; name a local folder")
	case c.String("work") == "" && !c.Bool("dry-run"):
		return usagef("--cache is a URL; name a local folder for files that are being written with --work")
	default:
		if err := objects.CheckWritable(folder); err != nil {
			return usagef("--cache: %v", err)
		}
	}
	for _, name := range c.LocalFlagNames() {
		if slices.Contains([]string{"for", "cache", "work", "threads", "dry-run", "resume", "json"}, name) ||
			slices.Contains(own, name) {
			continue
		}
		var others []string
		for _, other := range frameworks {
			if slices.Contains(indexTargets[other], name) {
				others = append(others, "--for "+other)
			}
		}
		if others != nil {
			return usagef("--%s is a flag of %s; --for %s has no such setting", name, strings.Join(others, " and "),
				target)
		}
	}
	// Ranks share a build through the cache directory, so they need no messages.
	job := launchers.JobIn(os.Getenv)
	if job.Rank > 0 {
		c.App.Writer, c.App.ErrWriter = io.Discard, io.Discard // only the first rank prints
	}
	if job.Rank > 0 && (target == forOLMo || c.Bool("dry-run")) {
		return nil // the first rank does it: an order of OLMo-core is a single shuffle in a single file
	}
	if target == forOLMo {
		return runIndexOLMo(c)
	}
	var x foreignIndex
	var err error
	if target == forMegatron {
		x, err = megatronIndex(c)
	} else {
		x, err = blendCorpusIndex(c)
	}
	if err != nil {
		return err
	}
	if c.Bool("dry-run") {
		return printDryRun(c, x)
	}
	return buildIndex(c, x, job)
}

// A foreignIndex is an index of another framework with known names, before the build.
type foreignIndex interface {
	title() string
	entries(ctx context.Context) ([]rebuild.Entry, error)
	build(ctx context.Context, o rebuild.BuildOptions) (cache.Summary, error)
	start() string   // the arguments of the framework with which it finds the files
	asks() string    // other settings that the framework needs, as text; "" for none
	notes() []string // notes for the user
}

// An indexEntry is an entry as --json prints it.
type indexEntry struct {
	Kind        string      `json:"kind"`
	Split       string      `json:"split"`
	Prefixes    []string    `json:"prefixes"`
	Asked       string      `json:"asked"`   // number of requested samples, or none
	Samples     int64       `json:"samples"` // number of samples in the files
	Hash        string      `json:"hash"`
	Folder      string      `json:"folder"` // "" if the framework has no such files; none are written
	Marker      string      `json:"description_file"`
	Description string      `json:"description"`
	Files       []indexFile `json:"files"`
}

type indexFile struct {
	Name  string `json:"name"`
	Bytes int64  `json:"bytes"`
}

func newIndexEntry(e *rebuild.Entry) indexEntry {
	out := indexEntry{Kind: e.Class, Split: splitNames(e), Prefixes: e.Prefixes, Asked: noSamples, Samples: e.Length,
		Hash: e.Hash, Folder: e.Dir, Marker: e.Description, Description: e.Text}
	if e.Samples >= 0 {
		out.Asked = strconv.FormatInt(e.Samples, 10)
	}
	for k, name := range e.Files {
		out.Files = append(out.Files, indexFile{name, e.Sizes[k]})
	}
	return out
}

func splitNames(e *rebuild.Entry) string {
	names := make([]string, len(e.Splits))
	for i, s := range e.Splits {
		names[i] = s.String()
	}
	return strings.Join(names, ", ")
}

// threads returns --threads, or the number of cores if it is 0.
func threads(c *cli.Context) int {
	if n := c.Int("threads"); n > 0 {
		return n
	}
	return runtime.GOMAXPROCS(0)
}

// rankThreads returns --threads. If it is 0, rankThreads returns the number of cores for this rank:
// the cores to which the launcher bound it, or else its share of the machine's cores.
func rankThreads(c *cli.Context, job launchers.Process) int {
	n := threads(c)
	if c.Int("threads") == 0 && n >= machine.OnlineCores() {
		n = max(1, n/job.Here)
	}
	return n
}

// dryRunRows is the maximum number of rows in the table of a dry run.
const dryRunRows = 60

// printDryRun prints the files that a build would write.
func printDryRun(c *cli.Context, x foreignIndex) error {
	entries, err := x.entries(c.Context)
	if err != nil {
		return err
	}
	written := slices.DeleteFunc(slices.Clone(entries), func(e rebuild.Entry) bool { return e.Dir == "" })
	var total int64
	for i := range written {
		total += written[i].Bytes()
	}
	computing, err := rebuild.Estimate(c.Context, written, threads(c))
	if err != nil {
		return err
	}
	w := c.App.Writer
	if c.Bool("json") {
		list := make([]indexEntry, len(entries))
		for i := range entries {
			list[i] = newIndexEntry(&entries[i])
		}
		return printJSON(w, map[string]any{"for": x.title(), "entries": list, "bytes": total,
			"estimated_compute_seconds": computing.Seconds(), "arguments": x.start(), "asks": x.asks()})
	}
	fmt.Fprintf(w, "%s\n\n", x.title())
	t := newTable("split", "kind", "files of", "asked", "samples", "bytes", "name")
	for i := range entries[:min(len(entries), dryRunRows)] {
		e := &entries[i]
		asked := noSamples
		if e.Samples >= 0 {
			asked = quantity.Grouped(e.Samples)
		}
		of := quantity.Plural(int64(len(e.Prefixes)), "token file")
		if len(e.Prefixes) == 1 {
			of = e.Prefixes[0]
		}
		t.row(splitNames(e), e.Class, printable(of), asked, e.Length, e.Bytes(), e.Hash)
	}
	t.write(w)
	if n := len(entries) - dryRunRows; n > 0 {
		fmt.Fprintf(w, "… and %s (--json lists all)\n", quantity.Plural(int64(n), "set"))
	}
	fmt.Fprintf(w, "\n%s to write, %s. Computing them takes about %s on %s here, if the disk is fast enough.\n",
		quantity.Plural(fileCount(written), "file"), quantity.Bytes(total),
		quantity.Duration(computing), quantity.Plural(int64(threads(c)), "core"))
	printNotes(w, x)
	fmt.Fprint(w, "Nothing was written (--dry-run).\n\n")
	printStart(w, x)
	return nil
}

// fileCount returns the number of files of the entries, including descriptions.
func fileCount(entries []rebuild.Entry) (n int64) {
	for i := range entries {
		n += int64(len(entries[i].Files)) + 1
	}
	return n
}

// cacheFS returns the file system of --cache, which is nil for a local folder.
func cacheFS(c *cli.Context) (filesystem.FS, error) {
	if !objects.IsURL(c.String("cache")) {
		return nil, nil
	}
	work := c.String("work")
	err := os.MkdirAll(work, 0o777)
	if err == nil {
		_, err = atomicfile.Clean(work)
	}
	if err != nil {
		return nil, fmt.Errorf("--work: %w", err)
	}
	return objectfs.New(c.Context, nil, work), nil
}

// buildIndex writes the files.
func buildIndex(c *cli.Context, x foreignIndex, job launchers.Process) error {
	p := newProgress(c.App.ErrWriter)
	defer p.end()
	began := time.Now()
	waiting := map[string]bool{}
	o := rebuild.BuildOptions{Threads: rankThreads(c, job), Resume: c.Bool("resume"), Together: job.Size > 1}
	var err error
	if o.FS, err = cacheFS(c); err != nil {
		return err
	}
	o.Progress = func(e cache.Event) {
		if e.Stage == cache.Waiting && !waiting[e.Holder] {
			waiting[e.Holder] = true
			p.line("waiting for %s, which builds %s; "+
				"this process continues the work if the other is silent for a minute",
				e.Holder, e.Unit)
		}
		rate := float64(e.Bytes) / max(time.Since(began).Seconds(), 1e-3)
		p.update(fmt.Sprintf("%s of %s, %s/s, %d of %d sets complete", quantity.Bytes(e.Bytes), quantity.Bytes(e.Total),
			quantity.Bytes(int64(rate)), e.Finished, e.Units),
			float64(e.Bytes), float64(e.Total))
	}
	summary, err := x.build(c.Context, o)
	if other := new(cache.FailedError); job.Rank > 0 && errors.As(err, &other) {
		return exitCode(exitFailed) // the other process has printed the error
	}
	if err != nil {
		return err
	}
	p.end()
	took := time.Since(began)
	w := c.App.Writer
	if c.Bool("json") {
		return printJSON(w, map[string]any{"for": x.title(), "built": summary.Built, "kept": summary.Kept,
			"shared": summary.Shared, "foreign": summary.Foreign,
			"bytes": summary.Bytes, "seconds": took.Seconds(), "arguments": x.start(), "asks": x.asks()})
	}
	parts := []string{"nothing to build"}
	if summary.Built > 0 {
		parts[0] = fmt.Sprintf("%s built, %s in %.1f s", quantity.Plural(int64(summary.Built), "set"),
			quantity.Bytes(summary.Bytes),
			took.Seconds())
	}
	if summary.Kept > 0 {
		parts = append(parts, fmt.Sprintf("%s already complete", quantity.Plural(int64(summary.Kept), "set")))
	}
	if summary.Shared > 0 {
		parts = append(parts, fmt.Sprintf("%s built by other processes", quantity.Plural(int64(summary.Shared), "set")))
	}
	fmt.Fprintf(w, "%s: %s\n", x.title(), strings.Join(parts, "; "))
	if summary.Foreign > 0 {
		fmt.Fprintf(w, "note: %s from another program were kept without a check of arithmetic and "+
			"extra token; `mula index verify` compares them byte for byte, --resume=false replaces them\n",
			quantity.Plural(int64(summary.Foreign), "set"))
	}
	printNotes(w, x)
	printStart(w, x)
	return nil
}

// longArguments is the number of bytes after which a framework's arguments are cut, except with
// --json.
const longArguments = 2000

func printStart(w io.Writer, x foreignIndex) {
	text := printable(x.start())
	if len(text) > longArguments {
		text = strings.ToValidUTF8(text[:longArguments], "") + " … (--json has all)"
	}
	fmt.Fprintf(w, "The framework finds the files with these arguments:\n  %s\n", text)
	if asks := x.asks(); asks != "" {
		fmt.Fprintln(w, asks)
	}
}

func printNotes(w io.Writer, x foreignIndex) {
	for _, note := range x.notes() {
		fmt.Fprintf(w, "note: %s\n", printable(note))
	}
}
