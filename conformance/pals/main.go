//go:build unix

// Command pals is, for hosts.py, a stand-in for the mpiexec of PALS. Package palstest has it.
package main

import (
	"fmt"
	"os"

	"mula/train/launch/palstest"
)

func main() {
	self, err := os.Executable()
	if err != nil {
		fmt.Fprintln(os.Stderr, "pals:", err)
		os.Exit(1)
	}
	program := palstest.Program{Self: []string{self}, Stdout: os.Stdout, Stderr: os.Stderr}
	os.Exit(program.Run(os.Args[1:]))
}
