// Command gotest runs `go test` with the arguments given and prints what it prints. At the end it
// says in one line how many tests were skipped because a library is missing, and how to install it.
// It ends with the exit code of go test.
//
// The environment variable GO names the go command.
//
// The files of tests are in a folder in memory if the machine has 4 GiB for it, because some disks
// take long to create and remove many files. The environment variable TMPDIR names another folder.
package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"mula/internal/quantity"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code, err := goTest(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "gotest:", err)
	}
	os.Exit(code)
}

// goTest runs go test and returns its exit code. If ctx is done, it stops go test.
func goTest(ctx context.Context) (code int, err error) {
	// A package more than there are processors: some tests mostly wait.
	args := append([]string{"test", "-json", "-p", strconv.Itoa(runtime.NumCPU() + 1)}, os.Args[1:]...)
	c := exec.CommandContext(ctx, cmp.Or(os.Getenv("GO"), "go"), args...)
	c.Cancel = func() error { return c.Process.Signal(os.Interrupt) }
	c.Stdin, c.Stderr = os.Stdin, os.Stderr
	folder, err := inMemory()
	if err != nil {
		return 1, err
	}
	if folder != "" {
		defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
		c.Env = append(os.Environ(), "TMPDIR="+folder)
	}
	out, err := c.StdoutPipe()
	if err == nil {
		err = c.Start()
	}
	if err != nil {
		return 1, err
	}
	var r report
	readErr := r.read(out, os.Stdout)
	if readErr != nil {
		readErr = fmt.Errorf("reading what go test prints: %w", readErr)
		io.Copy(io.Discard, out)
	}
	err = c.Wait()
	fmt.Println(r.summary())
	if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.ExitCode() > 0 {
		return exit.ExitCode(), readErr
	}
	if err = errors.Join(err, readErr); err != nil {
		return 1, err
	}
	return 0, nil
}

// libraries lists libraries that tests need and may not find: a text in the message of the test,
// and the Debian packages of the library. The first match counts.
var libraries = []struct{ text, packages string }{
	{"intel-opencl-icd", "intel-opencl-icd"},
	{"oneDNN", "libdnnl2"},
	{"OpenCL", "pocl-opencl-icd ocl-icd-libopencl1"},
	{"opencl:", "pocl-opencl-icd ocl-icd-libopencl1"},
	{"no mpiexec", "mpich openmpi-bin"},
	{"no man program", "man-db groff"},
	{"no zsh on", "zsh"},
	{"no fish on", "fish"},
}

// longTest is in the message of a test that longtest.SkipIfShort has skipped.
const longTest = "a long test"

// An event is a line of `go test -json`; see `go doc test2json`.
type event struct {
	Action, Package, Test, Output string
}

// A report counts the tests that have ended.
type report struct {
	missing, long, other int64 // skipped for want of a library, as long tests, or for another reason
	partly               int64 // passed without the part that needs a library
	packages             []string
	running              map[string]*testedPackage
}

// A testedPackage holds what the tests of a package have printed, until it is known whether they
// fail.
type testedPackage struct {
	order []string                 // of the tests that print something
	tests map[string]*bytes.Buffer // by name; "" is the package itself
}

// read copies to w what go test prints without -json.
func (r *report) read(in io.Reader, w io.Writer) error {
	r.running = make(map[string]*testedPackage)
	lines := bufio.NewReader(in)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var e event
			if line[0] != '{' || json.Unmarshal(line, &e) != nil {
				if _, err := w.Write(line); err != nil {
					return err
				}
			} else if err := r.take(e, w); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

func (r *report) take(e event, w io.Writer) error {
	if e.Action == "build-output" {
		_, err := io.WriteString(w, e.Output)
		return err
	}
	p := r.running[e.Package]
	if p == nil {
		p = &testedPackage{tests: make(map[string]*bytes.Buffer)}
		r.running[e.Package] = p
	}
	switch {
	case e.Action == "output":
		if p.tests[e.Test] == nil {
			p.tests[e.Test] = new(bytes.Buffer)
			p.order = append(p.order, e.Test)
		}
		p.tests[e.Test].WriteString(e.Output)
	case e.Test == "" && (e.Action == "pass" || e.Action == "fail" || e.Action == "skip"):
		delete(r.running, e.Package)
		return p.print(w, e.Action == "fail")
	case e.Action == "skip" || e.Action == "pass":
		text, after := "", ""
		if b := p.tests[e.Test]; b != nil {
			text, after = atResult(b.String(), e.Test)
			b.Reset()
			b.WriteString(after)
		}
		r.note(text, e.Action == "skip")
	}
	return nil
}

// atResult divides the output of a test after the line with its result. What follows that line is
// the output of the package that go test attributes to the last test, such as the stack traces of a
// time limit.
func atResult(output, test string) (own, after string) {
	at := 0
	for line := range strings.Lines(output) {
		at += len(line)
		line = strings.TrimLeft(line, " ")
		if strings.HasPrefix(line, "--- PASS: "+test+" (") || strings.HasPrefix(line, "--- SKIP: "+test+" (") {
			return output[:at], output[at:]
		}
	}
	return output, ""
}

// note counts a test that was skipped or has passed, and its output.
func (r *report) note(text string, skipped bool) {
	if skipped && strings.Contains(text, longTest) {
		r.long++
		return
	}
	var message strings.Builder // without lines that name the test
	for line := range strings.Lines(text) {
		start := strings.TrimLeft(line, " ")
		if !strings.HasPrefix(start, "=== ") && !strings.HasPrefix(start, "--- ") {
			message.WriteString(line)
		}
	}
	text = message.String()
	missing := false
	for _, l := range libraries {
		if (skipped || strings.Contains(text, "apt-get install")) && strings.Contains(text, l.text) {
			missing = true
			for name := range strings.FieldsSeq(l.packages) {
				if !slices.Contains(r.packages, name) {
					r.packages = append(r.packages, name)
				}
			}
			break
		}
	}
	switch {
	case missing && skipped:
		r.missing++
	case missing:
		r.partly++
	case skipped:
		r.other++
	}
}

// print prints what go test prints of a package that has ended: its last line, or if it has failed
// all of the tests that did not pass.
func (p *testedPackage) print(w io.Writer, failed bool) error {
	own := ""
	if b := p.tests[""]; b != nil {
		own = b.String()
	}
	if !failed {
		for line := range strings.Lines(own) {
			if strings.HasPrefix(line, "ok  \t") || strings.HasPrefix(line, "?   \t") ||
				strings.Contains(line, "\tcoverage: ") {
				if _, err := io.WriteString(w, line); err != nil {
					return err
				}
			}
		}
		return nil
	}
	for _, name := range p.order {
		b := p.tests[name]
		if name == "" || b == nil {
			continue
		}
		// The line with the result of the test is printed first, as without -json.
		var ends, rest strings.Builder
		for line := range strings.Lines(b.String()) {
			switch {
			case strings.HasPrefix(line, "=== "):
			case strings.HasPrefix(strings.TrimLeft(line, " "), "--- FAIL: "):
				ends.WriteString(line)
			default:
				rest.WriteString(line)
			}
		}
		if _, err := io.WriteString(w, ends.String()+rest.String()); err != nil {
			return err
		}
	}
	_, err := io.WriteString(w, own)
	return err
}

// summary is the line at the end.
func (r *report) summary() string {
	text := "skipped: no test for want of a library"
	if r.missing+r.partly > 0 {
		text = fmt.Sprintf("skipped: %s for want of a library", quantity.Plural(r.missing, "test"))
		if r.partly > 0 {
			text += fmt.Sprintf(", and part of %s", quantity.Plural(r.partly, "test"))
		}
		text += "; to run all (Debian, Ubuntu): apt-get install " + strings.Join(r.packages, " ")
	}
	if r.long > 0 {
		text += fmt.Sprintf("; %s, which make test-long runs", quantity.Plural(r.long, "long test"))
	}
	if r.other > 0 {
		text += fmt.Sprintf("; %s for other reasons, which go test -v names", quantity.Plural(r.other, "test"))
	}
	return text
}
