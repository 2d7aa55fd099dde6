package lint

import (
	"errors"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

// A module is this repository, parsed.
type module struct {
	root  string // folder of go.mod
	path  string // import path
	files []*goFile
}

var parseOnce = sync.OnceValues(func() (*module, error) {
	root, path, err := findModule()
	if err != nil {
		return nil, err
	}
	files, err := parseModule(root)
	if err != nil {
		return nil, err
	}
	return &module{root, path, files}, nil
})

// thisModule returns this repository. The files are parsed once for all tests.
func thisModule(t *testing.T) *module {
	t.Helper()
	m, err := parseOnce()
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// A goFile is a parsed Go file. Its path is relative to the module, with slashes.
type goFile struct {
	path   string
	text   string
	syntax *ast.File
	set    *token.FileSet
}

func (f *goFile) parse(text []byte) error {
	var err error
	f.text = string(text)
	f.syntax, err = parser.ParseFile(f.set, f.path, text, parser.SkipObjectResolution|parser.ParseComments)
	return err
}

func (f *goFile) test() bool { return strings.HasSuffix(f.path, "_test.go") }

func (f *goFile) top() string {
	top, _, _ := strings.Cut(f.path, "/")
	return top
}

// parseModule parses every Go file of the module at root, whatever its build constraints. It skips
// nested modules.
func parseModule(root string) ([]*goFile, error) {
	var files []*goFile
	err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		base := entry.Name()
		if entry.IsDir() {
			if name == root {
				return nil
			}
			if base == "testdata" || base == "vendor" || strings.HasPrefix(base, ".") || strings.HasPrefix(base, "_") {
				return fs.SkipDir
			}
			if _, err := os.Stat(filepath.Join(name, "go.mod")); err == nil {
				return fs.SkipDir
			}
			return nil
		}
		if filepath.Ext(base) != ".go" || strings.HasPrefix(base, ".") || strings.HasPrefix(base, "_") {
			return nil
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		f := &goFile{path: filepath.ToSlash(rel), set: token.NewFileSet()}
		text, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		if err := f.parse(text); err != nil {
			return err
		}
		files = append(files, f)
		return nil
	})
	return files, err
}

// findModule returns the folder and the import path of the module that contains the test.
func findModule() (root, module string, err error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", "", err
	}
	for {
		text, err := os.ReadFile(filepath.Join(dir, "go.mod"))
		if err == nil {
			for line := range strings.Lines(string(text)) {
				if fields := strings.Fields(line); len(fields) >= 2 && fields[0] == "module" {
					return dir, fields[1], nil
				}
			}
			return "", "", fmt.Errorf("%s/go.mod names no module", dir)
		}
		if !errors.Is(err, fs.ErrNotExist) {
			return "", "", err
		}
		if filepath.Dir(dir) == dir {
			return "", "", errors.New("the test is not in a module")
		}
		dir = filepath.Dir(dir)
	}
}
