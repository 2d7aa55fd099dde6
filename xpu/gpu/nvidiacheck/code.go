package main

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// A kernel is the compiled form of a kernel.
type kernel struct {
	file      string
	precision string // one or several

	Name      string
	Registers int // of a thread
	Spilled   int // bytes of registers that are written to memory
	Stack     int // bytes of a thread's memory
	Shared    int // bytes of local memory

	code
}

// code counts machine instructions.
type code struct {
	Instructions, Matrix         int
	LoopInstructions, LoopMatrix int // of the loop with the most matrix instructions, the smallest such loop
}

func (c code) ratio() float64 {
	if c.LoopInstructions == 0 {
		return 0
	}
	return float64(c.LoopMatrix) / float64(c.LoopInstructions)
}

func (k kernel) String() string {
	s := fmt.Sprintf("%-24s %-25s %-10s  %3d registers  %3d bytes spilled  %3d bytes of stack  %5d bytes of local "+
		"memory  %5d instructions", k.Name, k.file, k.precision, k.Registers, k.Spilled, k.Stack, k.Shared,
		k.Instructions)
	if k.Matrix > 0 {
		s += fmt.Sprintf("  %d HMMA, in the inner loop %d of %d instructions (%.3f)", k.Matrix, k.LoopMatrix,
			k.LoopInstructions, k.ratio())
	}
	return s
}

// What ptxas -v prints about a kernel.
var (
	entryLine = regexp.MustCompile(`Compiling entry function '(\w+)'`)
	stackLine = regexp.MustCompile(`(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads`)
	usedLine  = regexp.MustCompile(`Used (\d+) registers`)
	smemLine  = regexp.MustCompile(`(\d+) bytes smem`)
)

// parseUsage reads what ptxas prints about kernels. A program may have none for this device.
func parseUsage(text string) ([]kernel, error) {
	var kernels []kernel
	for _, line := range strings.Split(text, "\n") {
		if m := entryLine.FindStringSubmatch(line); m != nil {
			kernels = append(kernels, kernel{Name: m[1]})
			continue
		}
		if len(kernels) == 0 {
			continue
		}
		k := &kernels[len(kernels)-1]
		if m := stackLine.FindStringSubmatch(line); m != nil {
			k.Stack, k.Spilled = number(m[1]), number(m[2])+number(m[3])
		}
		if m := usedLine.FindStringSubmatch(line); m != nil {
			k.Registers = number(m[1])
			if m := smemLine.FindStringSubmatch(line); m != nil {
				k.Shared = number(m[1])
			}
		}
	}
	for _, k := range kernels {
		if k.Registers == 0 {
			return nil, fmt.Errorf("kernel %s: no number of registers in the output:\n%s", k.Name, text)
		}
	}
	return kernels, nil
}

func number(digits string) int {
	n, err := strconv.Atoi(digits)
	if err != nil {
		panic(err) // the expressions match digits
	}
	return n
}

// What nvdisasm -c prints.
var (
	sectionLine     = regexp.MustCompile(`^\s*\.section\s+\.text\.(\w+)`)
	labelLine       = regexp.MustCompile(`^(\.L_x_\d+):`)
	instructionLine = regexp.MustCompile(`^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?(\w[\w.]*)([^;]*);`)
	targetText      = regexp.MustCompile(`\(\.L_x_\d+\)`)
)

// countAll counts the instructions of kernels in a disassembly.
func countAll(kernels []kernel, text string) error {
	sections := map[string][]string{}
	name := ""
	for _, line := range strings.Split(text, "\n") {
		if m := sectionLine.FindStringSubmatch(line); m != nil {
			name = m[1]
			continue
		}
		sections[name] = append(sections[name], line)
	}
	var wrong []error
	for i := range kernels {
		k := &kernels[i]
		if k.code = count(sections[k.Name]); k.Instructions == 0 {
			wrong = append(wrong, fmt.Errorf("kernel %s: no instructions in the disassembly", k.Name))
		}
	}
	return errors.Join(wrong...)
}

// count counts the instructions of a kernel. A loop starts at a label and ends with a jump to it.
func count(lines []string) code {
	var c code
	type place struct{ instructions, matrix int }
	labels := map[string]place{}
	for _, line := range lines {
		if m := labelLine.FindStringSubmatch(line); m != nil {
			labels[m[1]] = place{c.Instructions, c.Matrix}
			continue
		}
		m := instructionLine.FindStringSubmatch(line)
		if m == nil || m[1] == "NOP" {
			continue
		}
		c.Instructions++
		if strings.HasPrefix(m[1], "HMMA.") {
			c.Matrix++
		}
		target := strings.Trim(targetText.FindString(m[2]), "()")
		if begin, ok := labels[target]; ok && m[1] == "BRA" {
			all, matrix := c.Instructions-begin.instructions, c.Matrix-begin.matrix
			if matrix > c.LoopMatrix || matrix == c.LoopMatrix && matrix > 0 && all < c.LoopInstructions {
				c.LoopInstructions, c.LoopMatrix = all, matrix
			}
		}
	}
	return c
}
