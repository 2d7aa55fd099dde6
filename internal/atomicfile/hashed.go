package atomicfile

import (
	"bufio"
	"crypto/sha256"
	"encoding/hex"
	"hash"
)

// Hashed is a file that is hashed while it is written, through Buffer.
type Hashed struct {
	File   *File
	Buffer *bufio.Writer

	hash  hash.Hash
	bytes int64
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

// Finish brings the file to disk under its temporary name and returns its SHA-256, in hexadecimal. What is left to do is to publish File.
func (h *Hashed) Finish() (sha256 string, err error) {
	if err := h.Buffer.Flush(); err != nil {
		return "", err
	}
	if err := h.File.Seal(); err != nil {
		return "", err
	}
	return hex.EncodeToString(h.hash.Sum(nil)), nil
}

// Bytes is the size of the file after [Hashed.Finish].
func (h *Hashed) Bytes() int64 { return h.bytes }

// toHashed is what Buffer writes to.
type toHashed struct{ *Hashed }

func (w toHashed) Write(p []byte) (int, error) {
	n, err := w.File.Write(p)
	w.hash.Write(p[:n])
	w.bytes += int64(n)
	return n, err
}
