package cli

import (
	"fmt"
	"io"
	"strings"
	"unicode/utf8"

	"github.com/urfave/cli/v2"

	"mula/doctor"
	"mula/internal/quantity"
)

func doctorCommand() *cli.Command {
	return &cli.Command{
		Name:      "doctor",
		Usage:     "check whether this machine and folders are fit for mula",
		ArgsUsage: "[FOLDER…]",
		Description: "Without FOLDER, checks the current folder and the cache folder. Writes up to 33 MB into a " +
			"temporary folder\n" +
			"in each FOLDER and removes it. Exits with 1 if a line is an error.\n\n" +
			"Example: mula doctor /data /scratch --require mpi",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "require",
				Usage: "report an error if one of these `LIBRARIES` is missing: " + strings.Join(doctor.Libraries,
					", ")},
			jsonFlag,
		},
		Action: runDoctor,
	}
}

// doctorReport is the output of mula doctor.
type doctorReport struct {
	Groups   []doctor.Group `json:"groups"`
	OK       int            `json:"ok"`
	Warnings int            `json:"warnings"`
	Errors   int            `json:"errors"`
}

func runDoctor(c *cli.Context) error {
	o := doctor.Options{Folders: c.Args().Slice(), Require: splitList(c.String("require"))}
	var report doctorReport
	err := doctor.Run(c.Context, doctor.System(), o, func(g doctor.Group) {
		report.Groups = append(report.Groups, g)
		for _, l := range g.Lines {
			switch l.Status {
			case doctor.OK:
				report.OK++
			case doctor.Warning:
				report.Warnings++
			default:
				report.Errors++
			}
		}
		if !c.Bool("json") {
			writeGroup(c.App.Writer, g, hasColour(c.App.Writer))
		}
	})
	if err != nil {
		return err
	}
	if c.Bool("json") {
		if err := printJSON(c.App.Writer, report); err != nil {
			return err
		}
	} else {
		fmt.Fprintf(c.App.Writer, "%d ok, %s, %s\n", report.OK, quantity.Plural(int64(report.Warnings), "warning"),
			quantity.Plural(int64(report.Errors), "error"))
	}
	if report.Errors > 0 {
		return exitCode(exitFailed)
	}
	return nil
}

// Widths of the columns of mula doctor.
const (
	doctorStatus  = 9
	doctorName    = 18
	doctorFinding = 46
)

func writeGroup(w io.Writer, g doctor.Group, colour bool) {
	fmt.Fprintln(w, printable(g.Title))
	for _, l := range g.Lines {
		finding := strings.ReplaceAll(printable(l.Finding), "\n", " ")
		status := statusText(string(l.Status), colour) + strings.Repeat(" ", max(1, doctorStatus-len(l.Status)))
		line := fmt.Sprintf("  %s%-*s%s", status, doctorName, l.Name, finding)
		if l.Needed != "" {
			line += strings.Repeat(" ", max(2, doctorFinding-utf8.RuneCountInString(finding))) + "for " + l.Needed
		}
		fmt.Fprintln(w, line)
		if l.Remedy != "" {
			fmt.Fprintf(w, "  %*s→ %s\n", doctorStatus+doctorName, "", printable(l.Remedy))
		}
	}
}
