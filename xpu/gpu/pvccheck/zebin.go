package main

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/goccy/go-yaml"
)

// A kernel is the compiled form of a kernel.
type kernel struct {
	file      string
	precision string // one or several

	Name      string
	Lanes     int // work-items of a sub-group
	Registers int // registers of a thread, 64 bytes each
	Scratch   int // bytes of a thread's memory for data that does not fit into registers

	code
}

// code counts machine instructions.
type code struct {
	Instructions, DPAS         int
	LoopInstructions, LoopDPAS int // of the loop with the most dpas, the smallest such loop
	LoopPrefetches             int // prefetches of 2D blocks in this loop
	LoopSignals                int // signals to a barrier in this loop
	BlockStores                int // stores of 2D blocks
}

func (c code) ratio() float64 {
	if c.LoopInstructions == 0 {
		return 0
	}
	return float64(c.LoopDPAS) / float64(c.LoopInstructions)
}

func (k kernel) String() string {
	s := fmt.Sprintf("%-24s %-25s %-10s  %2d lanes  %3d registers  %5d bytes of scratch  %5d instructions", k.Name,
		k.file, k.precision, k.Lanes, k.Registers, k.Scratch, k.Instructions)
	if k.DPAS > 0 {
		s += fmt.Sprintf("  %d dpas, in the inner loop %d of %d instructions (%.3f)", k.DPAS, k.LoopDPAS,
			k.LoopInstructions, k.ratio())
	}
	return s
}

// inspect reads a binary of Intel's compiler, in its zebin format: an ELF file whose sections
// .text.NAME contain the code of kernels, and whose section .ze_info describes them in YAML. A
// program may have no kernels for this device.
func inspect(data []byte) ([]kernel, error) {
	f, err := elf.NewFile(bytes.NewReader(data))
	if err != nil {
		return nil, fmt.Errorf("the compiler's output: %w", err)
	}
	defer f.Close()
	if f.Machine != elf.EM_INTEL205 {
		return nil, fmt.Errorf("the compiler's output is for machine %v, not %v", f.Machine, elf.EM_INTEL205)
	}
	var kernels []kernel
	described := map[string]bool{symbolTable: true}
	if section := f.Section(".ze_info"); section != nil {
		text, err := section.Data()
		if err != nil {
			return nil, fmt.Errorf(".ze_info: %w", err)
		}
		if kernels, err = parseInfo(text); err != nil {
			return nil, err
		}
	}
	for _, k := range kernels {
		described[k.Name] = true
	}
	for _, section := range f.Sections {
		if name, ok := strings.CutPrefix(section.Name, ".text."); ok && !described[name] {
			return nil, fmt.Errorf("kernel %s is not described", name)
		}
	}
	for i := range kernels {
		k := &kernels[i]
		section := f.Section(".text." + k.Name)
		if section == nil {
			return nil, fmt.Errorf("kernel %s has no code", k.Name)
		}
		text, err := section.Data()
		if err != nil {
			return nil, fmt.Errorf("kernel %s: %w", k.Name, err)
		}
		if k.code, err = count(text); err != nil {
			return nil, fmt.Errorf("kernel %s: %w", k.Name, err)
		}
	}
	return kernels, nil
}

// symbolTable is not a kernel: the compiler creates it for programs with functions.
const symbolTable = "Intel_Symbol_Table_Void_Program"

// parseInfo reads the descriptions of kernels in .ze_info.
func parseInfo(text []byte) ([]kernel, error) {
	var info struct {
		Kernels []struct {
			Name        string
			Environment struct {
				Registers int `yaml:"grf_count"`
				Lanes     int `yaml:"simd_size"`
			} `yaml:"execution_env"`
			Memory []struct {
				Type string
				Size int
			} `yaml:"per_thread_memory_buffers"`
		}
	}
	if err := yaml.Unmarshal([]byte(strings.TrimRight(string(text), "\x00")), &info); err != nil {
		return nil, fmt.Errorf(".ze_info: %w", err)
	}
	var kernels []kernel
	for _, k := range info.Kernels {
		if k.Name == symbolTable {
			continue
		}
		scratch := 0
		for _, m := range k.Memory {
			if m.Type == "scratch" {
				scratch += m.Size
			}
		}
		kernels = append(kernels, kernel{Name: k.Name, Lanes: k.Environment.Lanes, Registers: k.Environment.Registers,
			Scratch: scratch})
	}
	return kernels, nil
}

// The encoding of instructions, as far as needed here: 16 bytes, or 8 if bit 29 is set; the opcode
// is in the lowest 7 bits; bytes 12 to 15 of a jump are its distance from itself. Determined by
// comparison with the disassembler iga64 (Debian's libigc-tools).
const (
	compacted                    = 1 << 5 // in byte 3
	opJump, opWhile, opGoto      = 0x20, 0x27, 0x2e
	opDPAS, opDPASW, opcodeMask  = 0x59, 0x5a, 0x7f
	opSend                       = 0x31
	shortInstruction, fullLength = 8, 16
)

// Messages of send. The unit that gets a message is in bits 92 to 95, its kind in bits 81 to 86,
// and the number of registers of the answer in bits 51 to 55. A prefetch is a load without an
// answer.
const (
	memoryUnit, barrierUnit       = 15, 3
	loadBlock, storeBlock, signal = 3, 7, 4
)

// message returns the unit and the kind of a message, and whether it has an answer.
func message(instruction []byte) (unit, kind int, answer bool) {
	word := binary.LittleEndian.Uint32(instruction[8:])
	return int(word >> 28), int(word >> 17 & 63), instruction[6]>>3 != 0
}

// count counts instructions. After the last one the compiler adds zeros, opcode 0, which do
// nothing.
func count(text []byte) (code, error) {
	var c code
	var dpas, prefetches, signals []int // positions
	at := map[int]int{}                 // index of the instruction at a position
	type loop struct{ begin, end int }
	var loops []loop
	for p := 0; p < len(text); {
		length := fullLength
		if len(text)-p < shortInstruction {
			return code{}, fmt.Errorf("its code of %d bytes ends within an instruction", len(text))
		}
		if text[p+3]&compacted != 0 {
			length = shortInstruction
		}
		if len(text)-p < length {
			break // the zeros at the end
		}
		op := text[p] & opcodeMask
		if op != 0 {
			at[p] = c.Instructions
			c.Instructions++
		}
		switch {
		case op == opDPAS || op == opDPASW:
			c.DPAS++
			dpas = append(dpas, p)
		case length == fullLength && op == opSend:
			switch unit, kind, answer := message(text[p:]); {
			case unit == memoryUnit && kind == loadBlock && !answer:
				prefetches = append(prefetches, p)
			case unit == memoryUnit && kind == storeBlock:
				c.BlockStores++
			case unit == barrierUnit && kind == signal:
				signals = append(signals, p)
			}
		case length == fullLength && (op == opJump || op == opWhile || op == opGoto):
			if to := p + int(int32(binary.LittleEndian.Uint32(text[p+12:]))); to < p && to >= 0 {
				loops = append(loops, loop{to, p})
			}
		}
		p += length
	}
	for _, l := range loops {
		begin, ok := at[l.begin]
		if !ok {
			return code{}, fmt.Errorf("a jump at byte %d leads to byte %d, where no instruction starts", l.end, l.begin)
		}
		inside := func(positions []int) (n int) {
			for _, p := range positions {
				if p >= l.begin && p <= l.end {
					n++
				}
			}
			return n
		}
		n, of := inside(dpas), at[l.end]-begin+1
		if n > c.LoopDPAS || n > 0 && n == c.LoopDPAS && of < c.LoopInstructions {
			c.LoopDPAS, c.LoopInstructions = n, of
			c.LoopPrefetches, c.LoopSignals = inside(prefetches), inside(signals)
		}
	}
	return c, nil
}
