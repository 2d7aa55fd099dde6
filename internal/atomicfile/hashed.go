package atomicfile

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"hash"
	"sync"
)

// Hashed is a file that is hashed while it is written, through Buffer: a part of it in the
// background while the next is made.
type Hashed struct {
	File   *File
	Buffer *bufio.Writer

	hash   hash.Hash // of another goroutine until hashing is done
	part   []byte    // what that one reads
	hashed sync.WaitGroup
	bytes  int64
}

// CreateHashed is [Create] for a file that is to be hashed.
func CreateHashed(path string) (*Hashed, error) {
	file, err := Create(path)
	if err != nil {
		return nil, err
	}
	h := &Hashed{File: file, hash: sha256.New()}
	h.Buffer = bufio.NewWriterSize(toHashed{h}, 1<<20)
	return h, nil
}

// Finish brings the file to disk under its temporary name and returns its SHA-256, in hexadecimal.
// What is left to do is to publish File.
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

// Bytes is the size of the file after [Hashed.Finish].
func (h *Hashed) Bytes() int64 { return h.bytes }

// toHashed is what Buffer writes to.
type toHashed struct{ *Hashed }

func (w toHashed) Write(p []byte) (int, error) {
	n, err := w.File.Write(p)
	w.bytes += int64(n)
	w.hashed.Wait() // one goroutine at a time, which ends by itself whatever becomes of the file
	w.part = append(w.part[:0], p[:n]...)
	w.hashed.Go(func() { w.hash.Write(w.part) })
	return n, err
}
