package cli

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"mula/index/gpt"
	"mula/index/greedy"
	"mula/index/numpy"
	"mula/internal/version"
	"mula/xpu"
	"mula/xpu/cpu"
)

func init() {
	cli.VersionPrinter = func(c *cli.Context) { printVersion(c.App.Writer, version.Read()) }
}

func versionCommand() *cli.Command {
	return &cli.Command{
		Name:        "version",
		Usage:       "print the version, the commit, the CPU kernels in use and the build settings",
		Description: "Example: mula version --json",
		Flags:       []cli.Flag{jsonFlag},
		Action: func(c *cli.Context) error {
			if err := noOperands(c); err != nil {
				return err
			}
			report := versionReport{version.Read(), kernelsInUse()}
			if c.Bool("json") {
				return printJSON(c.App.Writer, report)
			}
			return report.print(c.App.Writer)
		},
	}
}

// A versionReport is the output of `mula version`.
type versionReport struct {
	version.Build
	Kernels kernelReport `json:"kernels"`
}

// A kernelReport names the instruction sets that the kernels use on this machine.
type kernelReport struct {
	FP32    string `json:"products_fp32"`
	BF16    string `json:"products_bf16"`
	Lengths string `json:"index_lengths"`
	Blends  string `json:"index_blends"`
	Shuffle string `json:"index_shuffles"`
}

func kernelsInUse() kernelReport {
	return kernelReport{cpu.Kernels(xpu.FP32), cpu.Kernels(xpu.BF16), gpt.Kernels(), greedy.Kernels(), numpy.Kernels()}
}

// commitText is the first digits of the commit, with "(modified)" if the sources differ from it.
func commitText(b version.Build, digits int) string {
	switch {
	case b.Commit == "":
		return "unknown"
	case b.Modified:
		return fmt.Sprintf("%.*s (modified)", digits, b.Commit)
	default:
		return fmt.Sprintf("%.*s", digits, b.Commit)
	}
}

// printVersion prints the line of `mula --version`.
func printVersion(w io.Writer, b version.Build) error {
	_, err := fmt.Fprintf(w, "mula %s (commit %s, %s, %s)\n", b.Version, commitText(b, 12), b.Go, b.Platform)
	return err
}

func (r versionReport) print(w io.Writer) error {
	var settings []string
	for _, key := range slices.Sorted(maps.Keys(r.Settings)) {
		settings = append(settings, key+"="+r.Settings[key])
	}
	k := r.Kernels
	for _, row := range [][2]string{
		{"mula", r.Version},
		{"commit", commitText(r.Build, 40)},
		{"date", cmp.Or(r.Date, "unknown")},
		{"go", r.Go},
		{"platform", r.Platform},
		{"kernels", fmt.Sprintf("products: fp32 %s, bf16 %s; index files: lengths %s, blends %s, shuffles %s", k.FP32,
			k.BF16, k.Lengths, k.Blends, k.Shuffle)},
		{"settings", cmp.Or(strings.Join(settings, " "), "unknown")},
	} {
		if _, err := fmt.Fprintf(w, "%-9s %s\n", row[0], row[1]); err != nil {
			return err
		}
	}
	return nil
}
