package job

import (
	"bufio"
	"encoding/json"

	"mula/internal/atomicfile"
	"mula/tokenize/documents"
)

// rejects is the file that lists the documents that were skipped, a line of JSON each ([documents.DocumentError.MarshalJSON]).
type rejects struct {
	file   *atomicfile.File
	buffer *bufio.Writer
}

func createRejects(path string) (*rejects, error) {
	f, err := atomicfile.Create(path)
	if err != nil {
		return nil, err
	}
	return &rejects{f, bufio.NewWriter(f)}, nil
}

func (r *rejects) append(bad *documents.DocumentError) error {
	line, err := json.Marshal(bad)
	if err != nil {
		return err
	}
	_, err = r.buffer.Write(append(line, '\n'))
	return err
}

func (r *rejects) publish() error {
	if err := r.buffer.Flush(); err != nil {
		return err
	}
	return r.file.Publish()
}
