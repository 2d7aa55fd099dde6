package documents

import (
	"bytes"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

// endings maps file name extensions to formats, without extensions of compression.
var endings = []struct {
	ending string
	format Format
}{
	{".jsonl", JSONLines}, {".jsonlines", JSONLines}, {".ndjson", JSONLines},
	{".json", JSON}, // or JSON lines: decided by the content
	{".txt", Text},
	{".parquet", Parquet}, {".parq", Parquet},
	{".arrow", Arrow}, {".feather", Arrow},
}

var compressedEndings = []string{".gz", ".zst", ".zstd"}

// Endings lists the file name extensions that [hasEnding] accepts, for messages.
const Endings = ".jsonl, .jsonlines, .ndjson, .json and .txt, also with .gz, .zst or .zstd, .parquet, .parq, " +
	".arrow, .feather"

// hasEnding reports whether a file in a folder is a file of documents, by the extension of its
// name; see [Endings].
func hasEnding(name string) bool {
	format, compressed := byName(name)
	return format != Auto && !(compressed && (format == Parquet || format == Arrow))
}

// byName returns the format of a file name, Auto if the name does not show it.
func byName(name string) (f Format, compressed bool) {
	ending := strings.ToLower(filepath.Ext(name))
	if slices.Contains(compressedEndings, ending) {
		compressed = true
		ending = strings.ToLower(filepath.Ext(name[:len(name)-len(ending)]))
	}
	for _, e := range endings {
		if e.ending == ending {
			return e.format, compressed
		}
	}
	return Auto, compressed
}

// byMagic returns the format whose magic bytes a content starts with, Auto if there is none.
func byMagic(head []byte) Format {
	switch h := string(head[:min(len(head), 8)]); {
	case strings.HasPrefix(h, "PAR1"), strings.HasPrefix(h, "PARE"):
		return Parquet
	case strings.HasPrefix(h, "ARROW1"), strings.HasPrefix(h, "FEA1"):
		return Arrow
	// a stream's message with its length
	case len(h) == 8 && strings.HasPrefix(h, "\xff\xff\xff\xff") && h[7] == 0:
		return Arrow
	}
	return Auto
}

// formatOf returns the format of a file. head is the start of its decompressed content. Errors
// contain the detected content, the format by name or option, and the remedy.
func formatOf(file string, head []byte, c compression, asked Format) (Format, error) {
	magic := byMagic(head)
	named, compressed := byName(file)
	begin := func() string {
		if len(head) == 0 {
			return "is empty"
		}
		return fmt.Sprintf("starts with %q", head[:min(len(head), 8)])
	}
	switch {
	case compressed && c == plain && asked == Auto && len(head) == 0:
		return 0, fmt.Errorf("the file is empty, and a compressed file never is; fetch it again, or remove it from " +
			"the inputs")
	case compressed && c == plain && asked == Auto:
		return 0, fmt.Errorf("the file %s, so it is neither gzip nor zstd, although its extension says otherwise; "+
			"if it is not compressed, rename it",
			begin())
	case asked == Auto && magic != Auto && named != Auto && named != magic:
		return 0, fmt.Errorf("the file is %s by its first bytes and %s by its name; rename it, or pass --input-format",
			magic, named)
	case asked == Auto && magic == Auto && (named == Parquet || named == Arrow):
		return 0,
			fmt.Errorf("the file is %s by its name, but it %s; fetch it again, or rename it",
				named, begin())
	case asked != Auto && magic != Auto && asked != magic:
		return 0, fmt.Errorf("the file is %s by its first bytes, but --input-format is %s; remove --input-format",
			magic, asked)
	case (asked == Parquet || asked == Arrow) && magic != asked:
		return 0, fmt.Errorf("--input-format is %s, but the file %s; pass another --input-format, or fetch the file "+
			"again", asked, begin())
	case asked != Auto:
		return asked, nil
	case magic != Auto:
		return magic, nil
	case named == JSONLines, named == Text:
		return named, nil
	}
	switch start := bytes.TrimLeft(head, " \t\r\n"); {
	case len(start) == 0:
		return JSONLines, nil // no documents
	case start[0] == '[':
		return JSON, nil
	case start[0] == '{':
		return objectFormat(start), nil
	case named == JSON:
		return JSONLines, nil // with a bad first line
	}
	return 0, fmt.Errorf("cannot tell the format: the file %s, and its name has no known extension; pass "+
		"--input-format %s", begin(),
		strings.Join(formatNames[1:], ", "))
}

// objectFormat distinguishes JSON lines, whose first object ends on its first line, from JSON.
func objectFormat(head []byte) Format {
	var e extent
	n, ended := e.pass(head)
	if line := bytes.IndexByte(head, '\n'); line >= 0 && n > line {
		if n > line+1 && head[line+1] == '{' {
			// the next document after a broken line, rather than an object in an array
			return JSONLines
		}
		return JSON
	}
	if rest := bytes.TrimLeft(head[n:], " \t\r"); ended && len(rest) > 0 && rest[0] == '{' {
		return JSON
	}
	return JSONLines
}
