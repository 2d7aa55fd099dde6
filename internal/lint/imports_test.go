// Package lint checks the rules of this repository that the compiler does not check: allowed
// imports, printing, the language of the prose, the width of lines, and generated files. It has
// tests only.
package lint

import (
	"fmt"
	"go/ast"
	"go/token"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// height orders the top-level packages. A package imports only lower packages. A sub-package has
// the height of its top-level package. Sub-packages of one package may import each other.
var height = map[string]int{
	"conformance": 7, // tests of the command
	"cli":         6,
	"doctor":      5,
	"train":       4,
	"serve":       4,
	"moe":         3,
	"blend":       3,
	"index":       2,
	"tokenize":    2,
	"xpu":         2,
	"shards":      1,
	"internal":    0,
}

// aside lists packages that are not part of the program. They may import every package except cli.
// Only tests and aside packages import them.
var aside = []string{"fixtures", "benchmarks"}

// onInternal lists the packages that import only internal, although other packages are lower.
var onInternal = []string{"xpu", "shards"}

// vague lists package and file names that do not describe the content.
var vague = []string{"util", "utils", "common", "helper", "helpers"}

// breaches lists the violations of the rules in a file, each with its line.
func breaches(module string, f *goFile) []string {
	var out []string
	report := func(at token.Pos, format string, args ...any) {
		line := 1
		if at.IsValid() {
			line = f.set.Position(at).Line
		}
		out = append(out, fmt.Sprintf("%s:%d: %s", f.path, line, fmt.Sprintf(format, args...)))
	}
	names := strings.Split(strings.TrimSuffix(strings.TrimSuffix(f.path, ".go"), "_test"), "/")
	for _, name := range append(names, strings.TrimSuffix(f.syntax.Name.Name, "_test")) {
		if slices.Contains(vague, name) {
			report(f.syntax.Package, "the name %q does not describe the content", name)
		}
	}
	_, known := height[f.top()]
	if !known && !slices.Contains(aside, f.top()) {
		report(f.syntax.Package,
			"package %q is missing in the import rule: add it to internal/lint and to ARCHITECTURE.md",
			path.Dir(f.path))
		return out
	}
	for _, spec := range f.syntax.Imports {
		target, err := strconv.Unquote(spec.Path.Value)
		if err != nil {
			report(spec.Pos(), "import %s", spec.Path.Value)
			continue
		}
		if spec.Name != nil && spec.Name.Name == "." {
			report(spec.Pos(), "import of %q with a dot hides where names come from", target)
		}
		if target == module {
			target += "/"
		}
		if ours, ok := strings.CutPrefix(target, module+"/"); ok {
			if why := refuse(f, ours); why != "" {
				report(spec.Pos(), "imports %s: %s", ours, why)
			}
		}
	}
	if f.top() != "cli" && f.syntax.Name.Name != "main" && !f.test() {
		prints(f, report)
	}
	return out
}

// refuse returns the reason why a file may not import a package of this module, or "". The path of
// the package is relative to the module.
func refuse(f *goFile, imported string) string {
	top, _, _ := strings.Cut(imported, "/")
	from := f.top()
	switch {
	case top == from:
		return ""
	case top == "cli" && from != "conformance":
		return "only the conformance tests import cli"
	case slices.Contains(aside, top):
		if f.test() {
			return ""
		}
		return "only tests import " + top
	case slices.Contains(aside, from):
		return ""
	}
	to, known := height[top]
	switch {
	case !known:
		return "the import rule does not list it"
	case from == "internal":
		return "internal imports only internal"
	case slices.Contains(onInternal, from) && top != "internal":
		return from + " imports only internal"
	case to >= height[from]:
		return "imports run downwards: cli → doctor → {train, serve} → {moe, blend} → {index, tokenize, xpu} → " +
			"shards → internal"
	}
	return ""
}

// printers lists, by import path, the names that print or end the process. "*" means every name.
var printers = map[string][]string{
	"os":  {"Stdout", "Stderr", "Exit"},
	"fmt": {"Print", "Printf", "Println"},
	"log": {"*"},
	"log/slog": {
		"Debug", "DebugContext", "Info", "InfoContext", "Warn", "WarnContext", "Error", "ErrorContext", "Log",
		"LogAttrs", "Default", "SetDefault",
		"SetLogLoggerLevel",
	},
}

// prints reports uses of printers and of the built-in print and println.
func prints(f *goFile, report func(token.Pos, string, ...any)) {
	imported := make(map[string]string) // import path by local name
	for _, spec := range f.syntax.Imports {
		target, err := strconv.Unquote(spec.Path.Value)
		if err != nil || printers[target] == nil {
			continue
		}
		local := path.Base(target)
		if spec.Name != nil {
			local = spec.Name.Name
		}
		imported[local] = target
	}
	ast.Inspect(f.syntax, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.SelectorExpr:
			x, ok := n.X.(*ast.Ident)
			if !ok {
				return true
			}
			target, ok := imported[x.Name]
			if names := printers[target]; ok && (slices.Contains(names, n.Sel.Name) || names[0] == "*") {
				report(n.Pos(), "%s.%s: only cli and main programs print, log or exit; return an error or take a "+
					"function for progress", target, n.Sel.Name)
			}
		case *ast.CallExpr:
			if name, ok := n.Fun.(*ast.Ident); ok && (name.Name == "print" || name.Name == "println") {
				report(n.Pos(), "%s: only cli and main programs print", name.Name)
			}
		}
		return true
	})
}

// Every file of the module follows the rules.
func TestModule(t *testing.T) {
	m := thisModule(t)
	seen := make(map[string]bool)
	for _, f := range m.files {
		seen[f.path] = true
		for _, b := range breaches(m.path, f) {
			t.Error(b)
		}
	}
	for _, name := range []string{"internal/lint/imports_test.go", "internal/atomicfile/atomicfile.go"} {
		if !seen[name] {
			t.Errorf("%s was not examined", name)
		}
	}
}

// Each rule reports a violation, with the right reason.
func TestBreaches(t *testing.T) {
	for _, test := range []struct {
		path, text string
		want       []string // parts of the breaches, in order
	}{
		// Downwards.
		{"cli/train.go", `package cli; import ("mula/train"; "mula/shards"; "mula/internal/suggest")`, nil},
		{"cli/mula/main.go", `package main; import "mula/cli"`, nil},
		{"train/loop.go", `package train; import ("mula/moe"; "mula/blend"; "mula/xpu"; "mula/train/tensorboard")`,
			nil},
		{"moe/model.go", `package moe; import ("mula/xpu"; "mula/moe/safetensors")`, nil},
		{"moe/safetensors/read.go", `package safetensors; import "mula/internal/atomicfile"`, nil},
		{"blend/plan.go", `package blend; import ("mula/index"; "mula/shards")`, nil},
		{"xpu/cpu/device.go", `package cpu; import ("mula/xpu"; "mula/internal/x")`, nil},
		{"shards/read.go", `package shards; import ("mula/internal/atomicfile"; "golang.org/x/sys/unix")`, nil},
		{"shards/read_test.go", `package shards; import "mula/fixtures/golden"`, nil},
		{"fixtures/corpus/main.go", `package main; import ("mula/shards"; "mula/fixtures/golden")`, nil},
		{"benchmarks/blend_test.go", `package benchmarks; import ("mula/blend"; "mula/fixtures")`, nil},
		{"shards/other.go", `package shards; import "mulatto/cli"`, nil}, // another module's package
		// Upwards and sideways.
		{"train/loop.go", `package train; import "mula/cli"`,
			[]string{"train/loop.go:1: imports cli: only the conformance tests import cli"}},
		{"train/loop_test.go", `package train; import "mula/cli"`,
			[]string{"only the conformance tests import cli"}},
		{"fixtures/x.go", `package fixtures; import "mula/cli/table"`,
			[]string{"imports cli/table: only the conformance tests import cli"}},
		{"benchmarks/x.go", `package benchmarks; import "mula/cli"`,
			[]string{"only the conformance tests import cli"}},
		{"blend/plan.go", "package blend\n\nimport (\n\t\"fmt\"\n\t\"mula/train\"\n)",
			[]string{"blend/plan.go:5: imports train: imports run downwards"}},
		{"blend/plan.go", `package blend; import "mula/moe"`, []string{"imports moe: imports run downwards"}},
		{"moe/model.go", `package moe; import "mula/blend"`, []string{"imports blend: imports run downwards"}},
		{"index/order.go", `package index; import "mula/tokenize"`,
			[]string{"imports tokenize: imports run downwards"}},
		{"tokenize/run.go", `package tokenize; import ("mula/shards"; "mula/blend")`,
			[]string{"imports blend: imports run downwards"}},
		{"index/order_test.go", `package index; import "mula/blend"`, []string{"imports blend: imports run downwards"}},
		{"train/report/report.go", `package report; import "mula/cli"`,
			[]string{"only the conformance tests import cli"}},
		{"xpu/device.go", `package xpu; import "mula/shards"`,
			[]string{"imports shards: xpu imports only internal"}},
		{"xpu/cpu/device.go", `package cpu; import "mula/moe"`, []string{"xpu imports only internal"}},
		{"shards/read.go", `package shards; import "mula/index"`, []string{"shards imports only internal"}},
		{"internal/a/a.go", `package a; import ("mula/internal/b"; "mula/shards")`,
			[]string{"imports shards: internal imports only internal"}},
		{"internal/a/a_test.go", `package a; import "mula/xpu"`,
			[]string{"internal imports only internal"}},
		{"shards/read.go", `package shards; import "mula/fixtures"`, []string{"only tests import fixtures"}},
		{"blend/read.go", `package blend; import "mula/benchmarks"`, []string{"only tests import benchmarks"}},
		{"shards/read.go", `package shards; import "mula"`, []string{"the import rule does not list it"}},
		{"blend/read.go", `package blend; import "mula/stream"`,
			[]string{"imports stream: the import rule does not list it"}},
		{"stream/read.go", `package stream`, []string{`package "stream" is missing in the import rule`}},
		{"main.go", `package main`, []string{`package "." is missing in the import rule`}},
		{"blend/read.go", `package blend; import . "mula/shards"`, []string{`import of "mula/shards" with a dot`}},
		// Names.
		{"internal/util/x.go", `package util`, []string{`"util"`, `"util"`}}, // the directory and the package
		{"shards/helpers.go", `package shards`, []string{`the name "helpers" does not describe`}},
		{"shards/helpers_test.go", `package shards`, []string{`the name "helpers" does not describe`}},
		{"shards/x.go", `package common`, []string{`the name "common" does not describe`}},
		{"shards/x_test.go", `package common_test`, []string{`the name "common" does not describe`}},
		{"shards/common/x.go", `package x`, []string{`the name "common" does not describe`}},
		{"shards/commonmark.go", `package shards`, nil},
		// Printing.
		{"cli/out.go", `package cli; import ("fmt"; "os"); func f() { fmt.Println(os.Stdout); os.Exit(1) }`, nil},
		{"fixtures/x/main.go",
			`package main; import ("fmt"; "os"; "log"); func main() { fmt.Print(1); log.Fatal(os.Stderr) }`, nil},
		{"shards/x_test.go", `package shards; import ("fmt"; "os"); func TestMain() { fmt.Print(1); os.Exit(1) }`, nil},
		{"shards/x.go",
			`package shards; import ("fmt"; "os"); func f() { fmt.Fprintln(nil); fmt.Sprint(os.Args); os.Stdin.Close() }`, nil},
		// another os
		{"shards/x.go", `package shards; type s struct{ Exit, Stdout int }; func f(os s) { _ = os.Exit + os.Stdout }`,
			nil},
		{"shards/x.go", `package shards; import "log/slog"; func f(l *slog.Logger) { l.Info("x") }`, nil},
		{"shards/x.go", "package shards\nimport \"fmt\"\nfunc f() {\n\tfmt.Printf(\"x\")\n}",
			[]string{"shards/x.go:4: fmt.Printf: only cli and main programs print"}},
		{"moe/x.go", `package moe; import out "fmt"; func f() { out.Println(1) }`, []string{"fmt.Println"}},
		{"moe/x.go", `package moe; import "os"; func f() { g(os.Stdout); g(os.Stderr); defer os.Exit(1) }`,
			[]string{"os.Stdout", "os.Stderr", "os.Exit"}},
		{"moe/x.go", `package moe; import "log"; var l = log.Default()`, []string{"log.Default"}},
		{"moe/x.go", `package moe; import "log/slog"; func f() { slog.Info("x") }`, []string{"log/slog.Info"}},
		{"moe/x.go", `package moe; func f() { println(1); print(2) }`, []string{"println: only", "print: only"}},
		{"fixtures/x/x.go", `package x; import "fmt"; func f() { fmt.Print(1) }`, []string{"fmt.Print"}},
	} {
		f := &goFile{path: test.path, set: token.NewFileSet()}
		if err := f.parse([]byte(test.text)); err != nil {
			t.Fatal(err)
		}
		got := breaches("mula", f)
		ok := len(got) == len(test.want)
		for i := 0; ok && i < len(got); i++ {
			ok = strings.Contains(got[i], test.want[i]) && strings.HasPrefix(got[i], test.path+":")
		}
		if !ok {
			t.Errorf("%s, %s:\n got %q\nwant %q", test.path, test.text, got, test.want)
		}
	}
}

// parseModule finds the files in every directory of the module and in no other directory.
func TestParseModule(t *testing.T) {
	root := t.TempDir()
	for name, text := range map[string]string{
		"a/a.go": "package a", "a/b/b_windows.go": "package b", "a/b/b_test.go": "package b",
		"a/off.go":          "//go:build never\n\npackage a",
		"a/testdata/bad.go": "package {", "vendor/v/v.go": "package v", ".git/x.go": "package x",
		"_old/x.go": "package x", "a/_x.go": "package {", "a/notes.txt": "x",
		"nested/go.mod": "module nested", "nested/n.go": "package n", "nested/deep/n.go": "package n",
	} {
		name = filepath.Join(root, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(name), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	files, err := parseModule(root)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	for _, f := range files {
		got = append(got, f.path)
	}
	if want := []string{"a/a.go", "a/b/b_test.go", "a/b/b_windows.go", "a/off.go"}; !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
	if err := os.WriteFile(filepath.Join(root, "a", "broken.go"), []byte("package a\nfunc {"), 0o666); err != nil {
		t.Fatal(err)
	}
	if _, err := parseModule(root); err == nil || !strings.Contains(err.Error(), "broken.go:2:") {
		t.Errorf("a file that cannot be parsed: %v", err)
	}
}
