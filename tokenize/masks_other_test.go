//go:build !amd64 || purego

package tokenize

import "testing"

// eachInstructionSet runs a test once: there are no vector instructions.
func eachInstructionSet(t *testing.T, test func(t *testing.T)) {
	t.Helper()
	test(t)
}
