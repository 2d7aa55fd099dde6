package documents

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// benchmarkLines are files of about 64 MB with 4 kB of text a line.
func benchmarkLines() map[string]string {
	english := strings.Repeat("It is a truth universally acknowledged, that a single man in possession of a good "+
		"fortune, must be in want of a wife. ", 34)
	lines := map[string]string{
		"ascii":    english,
		"newlines": strings.ReplaceAll(english, ", ", `,\n`),
		"utf8":     strings.Repeat("これは日本語の文章です。", 114),
		"escapes":  strings.Repeat(`\u65e5\u672c\u8a9e`, 228),
	}
	for name, text := range lines {
		lines[name] = fmt.Sprintf(`{"id":"dclm-0000-000017","text":"%s","metadata":{"url":"https://example.org/a/b","score":0.8731,"tags":["a","b"]}}`+"\n", text)
	}
	return lines
}

// BenchmarkScan measures the scanner alone. "copy" measures a copy of the line, and "encoding/json"
// that package for the same two fields.
func BenchmarkScan(b *testing.B) {
	for name, line := range benchmarkLines() {
		memory := make([]byte, len(line))
		run := func(what string, f func()) {
			b.Run(name+"/"+what, func(b *testing.B) {
				b.SetBytes(int64(len(line)))
				for b.Loop() {
					f()
				}
			})
		}
		s := newScanner("text", "id")
		run("scan", func() {
			copy(memory, line)
			if _, _, bad := s.scan(memory); bad != nil {
				b.Fatal(bad.err)
			}
		})
		run("copy", func() { copy(memory, line) })
		run("encoding_json", func() {
			var d struct{ ID, Text string }
			if err := json.Unmarshal([]byte(line), &d); err != nil {
				b.Fatal(err)
			}
		})
	}
}

// BenchmarkRead is everything from the file, which is in memory, to documents.
func BenchmarkRead(b *testing.B) {
	for name, line := range benchmarkLines() {
		content := strings.Repeat(line, 64<<20/len(line))
		for file, content := range map[string]string{name + ".jsonl": content, name + ".jsonl.zst": zstded(content),
			name + ".jsonl.gz": gzipped(content)} {
			path := filepath.Join(b.TempDir(), file)
			if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
				b.Fatal(err)
			}
			b.Run(file, func(b *testing.B) {
				b.ReportAllocs()
				b.SetBytes(64 << 20)
				for b.Loop() {
					for _, err := range ReadDocuments(b.Context(), []string{path}, Options{}) {
						if err != nil {
							b.Fatal(err)
						}
					}
				}
			})
		}
	}
}
