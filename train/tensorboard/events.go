// Package tensorboard writes scalar curves as TensorBoard event files.
//
// An event file is a sequence of TFRecords, little-endian:
//
//	length uint64 | masked CRC-32C of length uint32 | data | masked CRC-32C of data uint32
//
// where masked(c) = rotate right(c, 15) + 0xa282ead8 (tensorflow/core/lib/io/record_writer.h,
// tensorflow/core/lib/hash/crc32c.h). The data of a record is one Event message
// (tensorflow/core/util/event.proto, tensorflow/core/framework/summary.proto); the first event of a
// file carries file_version "brain.Event:2". Only the fields below are written:
//
//	Event   { double wall_time = 1; int64 step = 2; string file_version = 3; Summary summary = 5;
//	          SessionLog session_log = 7; }
//	Summary { repeated Value value = 1; }   Value { string tag = 1; float simple_value = 2; }
//	SessionLog { SessionStatus status = 1; }   START = 1
package tensorboard

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"path/filepath"
	"time"

	"mula/internal/filesystem"
)

// A Scalar is one point of the curve named Tag; "loss/go" is drawn in the group "loss".
type Scalar struct {
	Tag   string
	Value float64 // written as float32, the only precision of the format
}

// A Writer appends to one event file. It is not safe for use by several goroutines.
type Writer struct {
	f   filesystem.File
	buf []byte
}

// Create starts a new event file in dir and creates dir if necessary. TensorBoard reads all event
// files of a directory as one run, in the order of their names, which is the order of their start
// times. It discards all points of other files at firstStep or later, so a resumed run replaces the
// points after its checkpoint.
func Create(fsys filesystem.FS, dir string, firstStep int64, now time.Time) (*Writer, error) {
	if err := filesystem.MkdirAll(fsys, dir, 0o755); err != nil {
		return nil, fmt.Errorf("tensorboard: %w", err)
	}
	host, err := os.Hostname()
	if err != nil {
		host = "localhost"
	}
	// With seconds alone, two quick restarts would share a file, or have the wrong order.
	name := fmt.Sprintf("events.out.tfevents.%010d.%09d.%s.%d", now.Unix(), now.Nanosecond(), host, os.Getpid())
	f, err := fsys.OpenFile(filepath.Join(dir, name), os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return nil, fmt.Errorf("tensorboard: %w", err)
	}
	w := &Writer{f: f}
	event := appendDouble(nil, 1, seconds(now))
	event = appendBytes(event, 3, []byte("brain.Event:2"))
	w.record(event)
	event = appendDouble(nil, 1, seconds(now))
	event = appendVarint(event, 2, uint64(firstStep))
	event = appendBytes(event, 7, appendVarint(nil, 1, 1))
	w.record(event)
	if err := w.flush(); err != nil {
		f.Close()
		return nil, err
	}
	return w, nil
}

// Write adds the points of one step.
func (w *Writer) Write(step int64, now time.Time, scalars []Scalar) error {
	var summary, value []byte
	for _, s := range scalars {
		value = appendBytes(value[:0], 1, []byte(s.Tag))
		value = append(value, 2<<3|5)
		value = binary.LittleEndian.AppendUint32(value, math.Float32bits(float32(s.Value)))
		summary = appendBytes(summary, 1, value)
	}
	event := appendDouble(nil, 1, seconds(now))
	event = appendVarint(event, 2, uint64(step))
	event = appendBytes(event, 5, summary)
	w.record(event)
	return w.flush()
}

// Close closes the file.
func (w *Writer) Close() error { return w.f.Close() }

func (w *Writer) record(data []byte) {
	start := len(w.buf)
	w.buf = binary.LittleEndian.AppendUint64(w.buf, uint64(len(data)))
	w.buf = binary.LittleEndian.AppendUint32(w.buf, maskedCRC(w.buf[start:]))
	w.buf = append(w.buf, data...)
	w.buf = binary.LittleEndian.AppendUint32(w.buf, maskedCRC(data))
}

// flush passes complete records to the operating system, so that the file of a killed process ends
// after a record.
func (w *Writer) flush() error {
	_, err := w.f.Write(w.buf)
	w.buf = w.buf[:0]
	if err != nil {
		return fmt.Errorf("tensorboard: %w", err)
	}
	return nil
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func maskedCRC(data []byte) uint32 {
	c := crc32.Checksum(data, castagnoli)
	return (c>>15 | c<<17) + 0xa282ead8
}

func seconds(t time.Time) float64 { return float64(t.UnixMicro()) / 1e6 }

func appendVarint(b []byte, field int, v uint64) []byte {
	return binary.AppendUvarint(binary.AppendUvarint(b, uint64(field)<<3), v)
}

func appendDouble(b []byte, field int, v float64) []byte {
	return binary.LittleEndian.AppendUint64(binary.AppendUvarint(b, uint64(field)<<3|1), math.Float64bits(v))
}

func appendBytes(b []byte, field int, v []byte) []byte {
	b = binary.AppendUvarint(b, uint64(field)<<3|2)
	return append(binary.AppendUvarint(b, uint64(len(v))), v...)
}
