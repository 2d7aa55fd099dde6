package atomicfile

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"sync"
)

// Hashed is a file whose SHA-256 is computed while it is written through Buffer. A background
// goroutine hashes one part while the caller produces the next.
type Hashed struct {
	File   *File
	Buffer *bufio.Writer

	hash   hash.Hash // used by the background goroutine until hashed.Wait returns
	part   []byte    // the bytes that the background goroutine hashes
	hashed sync.WaitGroup
	bytes  int64
}

// CreateHashed is [Create] for a file that is hashed while it is written.
func CreateHashed(path string) (*Hashed, error) { return Files{}.CreateHashed(path) }

// CreateHashed is [CreateHashed] on the file system.
func (w Files) CreateHashed(path string) (*Hashed, error) {
	file, err := w.Create(path)
	if err != nil {
		return nil, err
	}
	h := &Hashed{File: file, hash: sha256.New()}
	h.Buffer = bufio.NewWriterSize(toHashed{h}, 1<<20)
	return h, nil
}

// Finish syncs the file to disk under its temporary name and returns its SHA-256 in hexadecimal.
// The caller then publishes File.
func (h *Hashed) Finish() (sha256 string, err error) {
	if err := h.Buffer.Flush(); err != nil {
		return "", err
	}
	if err := h.File.Seal(); err != nil {
		return "", err
	}
	h.hashed.Wait()
	return hex.EncodeToString(h.hash.Sum(nil)), nil
}

// Bytes returns the size of the file. It is valid after [Hashed.Finish].
func (h *Hashed) Bytes() int64 { return h.bytes }

// toHashed is the destination of Buffer.
type toHashed struct{ *Hashed }

func (w toHashed) Write(p []byte) (int, error) {
	n, err := w.File.Write(p)
	w.bytes += int64(n)
	w.hashed.Wait() // one goroutine at a time; it ends on its own, also if the file is aborted
	w.part = append(w.part[:0], p[:n]...)
	w.hashed.Go(func() { w.hash.Write(w.part) })
	return n, err
}
