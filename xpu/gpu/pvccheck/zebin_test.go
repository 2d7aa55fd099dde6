package main

import (
	"encoding/binary"
	"encoding/hex"
	"strings"
	"testing"
)

// messages are instructions of pvc_forward, as Debian sid's ocloc 26.27.39122 compiles it.
var messages = map[string]string{
	"l": "314803000000fc030ce806f400000000", "p": "31270100000000000c0306f400000002",
	"s": "31340100000000000c030ef844680000", "b": "31260380000000000c03083000000000",
}

// assemble makes code: "x" is a short instruction, "X" a long one, "d" a short dpas, "D" a long
// one, "<n" a jump back over n bytes, and ">n" one ahead. Messages are bytes of the compiler's
// code: "l" is a load of a 2D block, "p" a prefetch, "s" a store, and "b" a signal to the barrier.
func assemble(t *testing.T, text string) []byte {
	t.Helper()
	var out []byte
	for _, word := range strings.Fields(text) {
		var i [16]byte
		length := 16
		switch word[0] {
		case 'x', 'd':
			i[3], length = compacted, 8
		}
		if text := messages[word]; text != "" {
			if _, err := hex.Decode(i[:], []byte(text)); err != nil {
				t.Fatal(err)
			}
		}
		switch word[0] {
		case 'l', 'p', 's', 'b':
		case 'x', 'X':
			i[0] = 0x61
		case 'd', 'D':
			i[0] = opDPAS
		case '<', '>':
			i[0] = opJump
			n := 0
			for _, c := range word[1:] {
				n = 10*n + int(c-'0')
			}
			if word[0] == '<' {
				n = -n
			}
			binary.LittleEndian.PutUint32(i[12:], uint32(int32(n)))
		case '0':
		default:
			t.Fatalf("%q is no instruction", word)
		}
		out = append(out, i[:length]...)
	}
	return out
}

func TestCount(t *testing.T) {
	for _, test := range []struct {
		name, text string
		want       code
	}{
		{"nothing", "", code{}},
		{"no loop", "X d D x", code{Instructions: 4, DPAS: 2}},
		{"a loop", "X x X d d <32 X", code{Instructions: 7, DPAS: 2, LoopInstructions: 4, LoopDPAS: 2}},
		{"a loop around it", "X x X d d <32 X <72", code{Instructions: 8, DPAS: 2, LoopInstructions: 4, LoopDPAS: 2}},
		{"a loop without dpas", "X d X <16", code{Instructions: 4, DPAS: 1}},
		{"a jump ahead", "X d >16 X", code{Instructions: 4, DPAS: 1}},
		{"messages", "l p s b X d l p p b <72 p s s", code{Instructions: 14, DPAS: 1, LoopInstructions: 6, LoopDPAS: 1,
			LoopPrefetches: 2, LoopSignals: 1, BlockStores: 3}},
		{"the loop with most", "d <8 d d <16", code{Instructions: 5, DPAS: 3, LoopInstructions: 3, LoopDPAS: 2}},
		{"zeros at the end", "X d <24 0 0 0", code{Instructions: 3, DPAS: 1, LoopInstructions: 3, LoopDPAS: 1}},
	} {
		got, err := count(assemble(t, test.text))
		if err != nil || got != test.want {
			t.Errorf("%s: %+v, %v; want %+v", test.name, got, err, test.want)
		}
	}
	if _, err := count(assemble(t, "X d <4")); err == nil || !strings.Contains(err.Error(), "no instruction starts") {
		t.Errorf("a jump into an instruction: %v", err)
	}
	if _, err := count([]byte{0x61, 0, 0, 0}); err == nil || !strings.Contains(err.Error(), "ends within") {
		t.Errorf("four bytes: %v", err)
	}
}

func TestParseInfo(t *testing.T) {
	got, err := parseInfo([]byte(`---
version: '1.20'
kernels:
  - name: first
    execution_env:
      grf_count: 256
      simd_size: 16
    payload_arguments:
      - arg_type: local_size
        size: 12
    per_thread_memory_buffers:
      - type: scratch
        usage: spill_fill_space
        size: 1024
      - type: global
        usage: other
        size: 8
      - type: scratch
        usage: private_space
        size: 64
  - name: second
    execution_env:
      grf_count: 128
      simd_size: 32
  - name: Intel_Symbol_Table_Void_Program
kernels_misc_info:
  - name: first
...
` + "\x00"))
	want := []kernel{{Name: "first", Lanes: 16, Registers: 256, Scratch: 1088},
		{Name: "second", Lanes: 32, Registers: 128}}
	if err != nil || len(got) != 2 || got[0] != want[0] || got[1] != want[1] {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
	for _, text := range []string{"kernels: [", "kernels: 1"} {
		if got, err := parseInfo([]byte(text)); err == nil {
			t.Errorf("%q: %+v", text, got)
		}
	}
}

func TestInspectRefuses(t *testing.T) {
	if _, err := inspect([]byte("CTNI patch tokens")); err == nil {
		t.Error("what is no ELF file was read")
	}
}
