package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
)

func TestCommitted(t *testing.T) {
	for name, assembly := range files {
		committed, err := os.ReadFile(filepath.Join("..", name))
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(committed, assembly()) {
			t.Errorf("%s is not what the generator writes: run go generate ./xpu/cpu", name)
		}
	}
}
