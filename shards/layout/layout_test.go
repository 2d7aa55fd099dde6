package layout

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"mula/shards"
)

// files is a layout whose shards are files, folders one whose shards are folders.
var (
	files = &Layout{ID: "a", Name: "a", Marker: ".ids", Own: []string{".ids.ends"}, Manifest: ".json", Sums: ".sums",
		IDs: ".ids", Types: []shards.DType{shards.UInt8, shards.UInt16, shards.UInt32}}
	folders = &Layout{ID: "b", Name: "b", Folder: true, Marker: "/index", Own: []string{"/own.json"},
		Manifest: "/own.json", Sums: "/own.sums", Origins: "/own.docs", IDs: "/part.*",
		Parts: regexp.MustCompile(`^/part\.\d+$`), Types: []shards.DType{shards.UInt16, shards.UInt32}}
)

func TestNames(t *testing.T) {
	for _, c := range []struct {
		got, want string
	}{
		{files.FilePath("dir/x", "ids.ends"), "dir/x.ids.ends"},
		{files.At("dir/x", ".json"), "dir/x.json"},
		{folders.FilePath("dir/x", "part.1"), filepath.Join("dir", "x", "part.1")},
		{folders.FilePath("dir/x/", "part.1"), filepath.Join("dir", "x", "part.1")},
		{folders.At("dir/x", "/index"), filepath.Join("dir", "x", "index")},
		{files.sizes(), "1, 2 or 4"},
		{folders.sizes(), "2 or 4"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
	for _, c := range []struct {
		layout *Layout
		path   string
		prefix string // "" if the path is not of the layout
	}{
		{files, "dir/x.ids", "dir/x"}, {files, "dir/x.ids.ends", "dir/x"}, {files, "dir/x.json", ""},
		{files, "dir/x", ""}, {folders, filepath.FromSlash("dir/index"), "dir"},
		{folders, filepath.FromSlash("dir/own.json"), "dir"}, {folders, filepath.FromSlash("dir/part.1"), ""},
	} {
		prefix, ok := c.layout.Prefix(c.path)
		if ok != (c.prefix != "") || ok && prefix != c.prefix || !ok && prefix != c.path {
			t.Errorf("%s: prefix %q, %t; want %q", c.path, prefix, ok, c.prefix)
		}
	}
	for ending, want := range map[string]bool{".ids": true, ".ids.ends": true, ".json": true, ".sums": true, "": false,
		".docs": false, ".ids.other": false} {
		if got := files.Has(ending); got != want {
			t.Errorf("%q is a file: %t", ending, got)
		}
	}
	for ending, want := range map[string]bool{"/index": true, "/own.docs": true, "/part.07": true, "/part.x": false,
		"index": false} {
		if got := folders.Has(ending); got != want {
			t.Errorf("%q is a file in the folder: %t", ending, got)
		}
	}
	if !files.HasIDs("ids") || files.HasIDs("ids.ends") || !folders.HasIDs("part.1") || folders.HasIDs("index") {
		t.Error("HasIDs is true for a file that holds no ids")
	}
}

func TestSizeOfIDs(t *testing.T) {
	dir := t.TempDir()
	for name, size := range map[string]int{"x.ids": 5, "x.ids.ends": 7, "part.0": 11, "part.1": 13, "own.sums": 17} {
		if err := os.WriteFile(filepath.Join(dir, name), make([]byte, size), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got := files.SizeOfIDs(filepath.Join(dir, "x")); got != 5 {
		t.Errorf("the ids of a file have %d bytes, want 5", got)
	}
	if got := folders.SizeOfIDs(dir); got != 11+13 {
		t.Errorf("the ids of a folder have %d bytes, want 24", got)
	}
	if got := files.SizeOfIDs(filepath.Join(dir, "missing")); got != 0 {
		t.Errorf("missing ids have %d bytes", got)
	}
}

func TestTypes(t *testing.T) {
	chooses := *files
	chooses.Choose = func(int) shards.DType { return shards.UInt16 }
	for _, c := range []struct {
		layout     *Layout
		vocabulary int
		want       shards.DType
	}{{files, 0, shards.UInt32}, {files, 256, shards.UInt8}, {files, 257, shards.UInt16},
		{files, 1<<16 + 1, shards.UInt32}, {folders, 2, shards.UInt16}, {&chooses, 2, shards.UInt16}} {
		if got := c.layout.DType(c.vocabulary); got != c.want {
			t.Errorf("%s, %d ids: %s, want %s", c.layout.Name, c.vocabulary, got, c.want)
		}
	}
	for size, want := range map[int]shards.DType{1: shards.UInt16, 2: shards.UInt16, 4: shards.UInt32,
		8: shards.UInt32} {
		if got := folders.Widen(size); got != want {
			t.Errorf("ids of %d bytes become %s, want %s", size, got, want)
		}
	}
	var created Settings
	l := *folders
	l.Create = func(_ *Layout, s Settings) (shards.DocumentWriter, error) {
		created = s
		return nil, nil
	}
	for width, want := range map[int]shards.DType{0: shards.UInt16, 2: shards.UInt16, 4: shards.UInt32, 1: "", 3: "",
		8: ""} {
		created = Settings{}
		_, err := l.NewShard("x", shards.TokenizerInfo{VocabSize: 9}, Options{Width: width})
		if created.DType != want || (err == nil) != (want != "") {
			t.Errorf("a width of %d creates a shard of %q, %v; want %q", width, created.DType, err, want)
		}
		if err != nil && !strings.Contains(err.Error(), fmt.Sprintf("2 or 4 bytes, not %d", width)) {
			t.Errorf("a width of %d: %v", width, err)
		}
	}
}

func TestTypeOf(t *testing.T) {
	types := []shards.DType{shards.UInt16, shards.UInt32}
	for _, c := range []struct {
		hints      Hints
		bytes, ids int64
		want       string // a type, or a part of the error
	}{
		{Hints{DType: "uint8"}, 5, -1, "uint8"},
		{Hints{DType: "int32"}, 8, 2, "uint32"},
		{Hints{DType: "uint16", VocabSize: 1<<16 + 1}, 8, -1, "does not fit uint16"},
		{Hints{DType: "float32"}, 8, 2, "element types are uint8"},
		{Hints{VocabSize: 100}, 8, 4, "uint16"},
		{Hints{VocabSize: 1 << 20}, 8, 2, "uint32"},
		{Hints{VocabSize: 100}, 8, 2, "give --dtype"},
		{Hints{DType: "uint16"}, 8, 2, "it was cut short, or is of another type"},
		{Hints{}, 0, -1, "uint16"},
		{Hints{}, 8, 2, "uint32"},
		{Hints{}, 8, 4, "either ids of 2 bytes, or a truncated array"},
		{Hints{}, 8, 8, "either ids of 1 bytes, or a truncated array"},
		{Hints{}, 8, 3, "do not fit 3 ids"},
		{Hints{}, 8, 0, "do not fit 0 ids"},
		{Hints{}, 8, -1, "unknown; give --dtype or --vocab-size"},
	} {
		got, err := c.hints.TypeOf("x", c.bytes, c.ids, types)
		if err == nil && string(got) != c.want || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v, %d bytes, %d ids: %q, %v; want %q", c.hints, c.bytes, c.ids, got, err, c.want)
		}
	}
}
