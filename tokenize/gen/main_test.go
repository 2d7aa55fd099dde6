package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

func TestCommitted(t *testing.T) {
	committed, err := os.ReadFile(filepath.Join("..", output))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(committed, assembly()) {
		t.Errorf("%s is not what the generator writes: run go generate ./tokenize", output)
	}
}
