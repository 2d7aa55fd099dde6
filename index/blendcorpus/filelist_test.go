package blendcorpus

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"mula/index/python"
)

func TestParseFileList(t *testing.T) {
	got, err := ParseFileList("2 /data/f0 web\r\n\n\t1_0.5\tf1  wiki \n1e-3 f2 web")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]File{{2, "/data/f0", "web"}, {10.5, "f1", "wiki"}, {0.001, "f2", "web"}}, got); diff != "" {
		t.Error(diff)
	}
	if flat, err := ParseFileList("1 a\n2 b\n"); err != nil || len(flat) != 2 || flat[1] != (File{2, "b", ""}) {
		t.Errorf("a flat list: %v, %v", flat, err)
	}
	for text, want := range map[string]string{
		"":                  "the file list is empty",
		"\n \n":             "the file list is empty",
		"1 a web\n\n1 b\n":  "line 3 of the file list: only some lines have a corpus",
		"1 a web\nb 1 web":  `line 2 of the file list: invalid weight "b"`,
		"1 a web extra":     "line 1 of the file list: 4 words",
		"# comment":         "line 1 of the file list",
		"1 a web\n-1 b web": "line 2 of the file list: the weight of b is -1.0",
		"inf a web":         "weight of a is inf",
		"nan a web":         "weight of a is nan",
		"1 \xff web":        "UTF-8",
		"1 a web\r1 b\r":    "line 2",
		"1\n":               "line 1 of the file list: 1 words",
	} {
		if _, err := ParseFileList(text); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
}

func TestParseDataPath(t *testing.T) {
	files, plain, err := ParseDataPath(strings.Fields("0.5 a 0.25 b"))
	if err != nil || plain || len(files) != 2 || files[1] != (File{0.25, "b", ""}) {
		t.Errorf("%v %v %v", files, plain, err)
	}
	if files, plain, err = ParseDataPath([]string{"a"}); err != nil || !plain || len(files) != 1 ||
		files[0].Prefix != "a" {
		t.Errorf("%v %v %v", files, plain, err)
	}
	for _, words := range []string{"", "1 a b", "a 1", "1 a x b", "-1 a", "1 a inf b"} {
		if files, _, err := ParseDataPath(strings.Fields(words)); err == nil {
			t.Errorf("%q: %v", words, files)
		}
	}
}

// A parsed list can be written as a list with the same result.
func FuzzParseFileList(f *testing.F) {
	f.Add(fileList)
	f.Add("1 a\n0.5\tb \r\n")
	f.Add("1e-5 /x/y corpus\n\n")
	f.Fuzz(func(t *testing.T, text string) {
		files, err := ParseFileList(text)
		if err != nil {
			return
		}
		var again strings.Builder
		for _, file := range files {
			fmt.Fprintln(&again, python.Float(file.Weight), file.Prefix, file.Corpus)
		}
		back, err := ParseFileList(again.String())
		if err != nil {
			t.Fatalf("%q becomes %q: %v", text, again.String(), err)
		}
		if diff := cmp.Diff(files, back); diff != "" {
			t.Error(diff)
		}
	})
}
