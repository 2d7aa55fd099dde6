// Encode answers documents with their ids, for conformance/ids.py:
//
//	encode -tokenizer tokenizer.json -specials tokens < documents > ids
//
// Each document has its length as a little-endian uint32 before its bytes. An answer is the number
// of ids and the ids, also as little-endian uint32. For a text that cannot be encoded, the answer
// is 2^32-1, the length of the error message and the message. Encode flushes its answers when it
// has no more buffered input, so that both sides can work at the same time.
package main

import (
	"bufio"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"mula/tokenize"
)

func main() {
	file := flag.String("tokenizer", "", "the tokenizer.json")
	specials := flag.String("specials", "tokens", "treat special tokens in a text as text or tokens")
	flag.Parse()
	if err := run(os.Stdin, os.Stdout, *file, *specials); err != nil {
		fmt.Fprintf(os.Stderr, "encode: %v\n", err)
		os.Exit(1)
	}
}

func run(in io.Reader, out io.Writer, file, specials string) error {
	t, err := tokenize.Load(file)
	if err != nil {
		return err
	}
	opts := tokenize.EncodeOptions{Specials: tokenize.SpecialsAsTokens}
	switch specials {
	case "tokens":
	case "text":
		opts.Specials = tokenize.SpecialsAsText
	default:
		return fmt.Errorf("-specials %s: want text or tokens", specials)
	}
	e := t.NewEncoder(opts)
	r, w := bufio.NewReaderSize(in, 1<<20), bufio.NewWriterSize(out, 1<<20)
	var document, answer []byte
	var ids []uint32
	for {
		if r.Buffered() == 0 {
			if err := w.Flush(); err != nil {
				return err
			}
		}
		var size [4]byte
		if _, err := io.ReadFull(r, size[:]); errors.Is(err, io.EOF) {
			return w.Flush()
		} else if err != nil {
			return err
		}
		n := int(binary.LittleEndian.Uint32(size[:]))
		if cap(document) < n {
			document = make([]byte, n)
		}
		document = document[:n]
		if _, err := io.ReadFull(r, document); err != nil {
			return err
		}
		answer = answer[:0]
		if ids, err = e.Append(ids[:0], document); err != nil {
			answer = binary.LittleEndian.AppendUint32(answer, 1<<32-1)
			answer = binary.LittleEndian.AppendUint32(answer, uint32(len(err.Error())))
			answer = append(answer, err.Error()...)
		} else {
			answer = binary.LittleEndian.AppendUint32(answer, uint32(len(ids)))
			for _, id := range ids {
				answer = binary.LittleEndian.AppendUint32(answer, id)
			}
		}
		if _, err := w.Write(answer); err != nil {
			return err
		}
	}
}
