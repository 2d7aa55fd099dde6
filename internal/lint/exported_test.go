package lint

import (
	"go/ast"
	"go/token"
	"maps"
	"path"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// public lists the packages whose exported names are for Go users outside this module.
var public = []string{"blend", "blend/mixture", "blend/stream", "shards", "tokenize"}

// exportedUnused lists how many exported names of a package no other package uses. The numbers only
// get smaller.
var exportedUnused = map[string]int{
	"blend/simulate":      2,
	"index":               2,
	"internal/atomicfile": 2,
	"internal/strictyaml": 2,
	"moe/safetensors":     1,
	"shards/formats":      2,
	"tokenize/documents":  5,
	"train/estimate":      1,
	"xpu/cpu":             8,
}

// unusedNames returns, by package, the exported names at the top level that only the package itself
// uses. A use is a mention in another package, or in an external test or Example. A used name also
// uses the names in its signature, type and exported fields, and a used constant its whole group.
func unusedNames(module string, files []*goFile) map[string][]string {
	declared := make(map[string]map[string][]string) // by package and name: the names that it needs
	used := make(map[string]map[string]bool)
	use := func(dir, name string) {
		if used[dir] == nil {
			used[dir] = make(map[string]bool)
		}
		used[dir][name] = true
	}
	for _, f := range files {
		dir := path.Dir(f.path)
		imported := make(map[string]string) // directories by local name
		for _, spec := range f.syntax.Imports {
			target, err := strconv.Unquote(spec.Path.Value)
			if err != nil || !strings.HasPrefix(target, module+"/") {
				continue
			}
			target = strings.TrimPrefix(target, module+"/")
			local := path.Base(target)
			if spec.Name != nil {
				local = spec.Name.Name
			}
			imported[local] = target
		}
		ast.Inspect(f.syntax, func(n ast.Node) bool {
			if s, ok := n.(*ast.SelectorExpr); ok {
				if x, ok := s.X.(*ast.Ident); ok && imported[x.Name] != "" {
					use(imported[x.Name], s.Sel.Name)
				}
			}
			return true
		})
		if f.test() || f.syntax.Name.Name == "main" {
			continue
		}
		if declared[dir] == nil {
			declared[dir] = make(map[string][]string)
		}
		for _, d := range f.syntax.Decls {
			for name, needs := range exportedNames(d) {
				declared[dir][name] = append(declared[dir][name], slices.Collect(maps.Keys(needs))...)
			}
		}
	}
	unused := make(map[string][]string)
	for dir, names := range declared {
		met := make(map[string]bool) // by users of the package
		var meet func(name string)
		meet = func(name string) {
			if needs, ok := names[name]; ok && !met[name] {
				met[name] = true
				for _, need := range needs {
					meet(need)
				}
			}
		}
		for name := range names {
			if used[dir][name] || strings.HasPrefix(name, ".") { // methods are not examined
				meet(name)
			}
		}
		for name := range names {
			if !met[name] {
				unused[dir] = append(unused[dir], name)
			}
		}
		slices.Sort(unused[dir])
	}
	return unused
}

// exportedNames returns the exported names that a declaration declares, and the exported names that
// a user of each meets: in parameters, results, types and exported fields. Methods have the name of
// their type before a point.
func exportedNames(d ast.Decl) map[string]map[string]bool {
	out := make(map[string]map[string]bool)
	declare := func(name string, types ...ast.Node) {
		needs := make(map[string]bool)
		for _, node := range types {
			ast.Inspect(node, func(n ast.Node) bool {
				switch n := n.(type) {
				case nil:
					return false
				case *ast.SelectorExpr, *ast.BlockStmt: // another package's name
					return false
				case *ast.Field:
					_, inStruct := node.(*ast.StructType)
					if inStruct && len(n.Names) > 0 && !slices.ContainsFunc(n.Names, (*ast.Ident).IsExported) {
						return false
					}
				case *ast.Ident:
					if n.IsExported() {
						needs[n.Name] = true
					}
				}
				return true
			})
		}
		out[name] = needs
	}
	switch d := d.(type) {
	case *ast.FuncDecl:
		if !d.Name.IsExported() {
			break
		}
		name := d.Name.Name
		if d.Recv != nil {
			name = "." + name
		}
		declare(name, d.Type)
	case *ast.GenDecl:
		defer shareUse(d, out)
		for _, spec := range d.Specs {
			switch s := spec.(type) {
			case *ast.TypeSpec:
				if s.Name.IsExported() {
					declare(s.Name.Name, s.Type)
				}
			case *ast.ValueSpec:
				for _, n := range s.Names {
					if n.IsExported() && s.Type != nil {
						declare(n.Name, s.Type)
					} else if n.IsExported() {
						declare(n.Name)
					}
				}
			}
		}
	}
	return out
}

// shareUse makes the constants of one group need each other: if one value of an enumeration is
// used, all values are exported.
func shareUse(d *ast.GenDecl, names map[string]map[string]bool) {
	if d.Tok != token.CONST || !d.Lparen.IsValid() {
		return
	}
	for name := range names {
		for other := range names {
			names[name][other] = true
		}
	}
}

// A name that only its own package uses is not exported.
func TestExportedNames(t *testing.T) {
	m := thisModule(t)
	unused := unusedNames(m.path, m.files)
	for dir, names := range unused {
		if slices.Contains(public, dir) {
			continue
		}
		if n, allowed := len(names), exportedUnused[dir]; n > allowed {
			t.Errorf("%s: %d exported names that no other package uses, want at most %d; unexport or delete: %s",
				dir, n, allowed, strings.Join(names, ", "))
		}
	}
}

// Each kind of use counts, and a mention in the package itself does not.
func TestUnusedNames(t *testing.T) {
	var files []*goFile
	for name, text := range map[string]string{
		"a/a.go": `package a; import "mula/b"; func Used(o Options) Result { Lonely(); return b.C }
			type Options struct { Field Inner; hidden Hidden }; type Result int; type Inner int; type Hidden int
			func Lonely() {}; func InTest() {}; var Never int; func Same() {}`,
		"a/a_test.go":          `package a; func TestX() { Same() }`,
		"a/external_test.go":   `package a_test; import "mula/a"; func TestX() { a.InTest() }`,
		"b/b.go":               `package b; const C = 1; const D = 2; const (E = 1; F = 2); const (G = 1; H = 2); var I = E`,
		"c/c.go":               `package c; import x "mula/a"; var y = x.Used`,
		"c/d.go":               `package c; import "mula/b"; var z = b.G`,
		"benchmarks/main.go":   `package main; func Main() {}`,
		"c/other/unrelated.go": `package other; type t struct{ Never int }; func f(b t) int { return b.Never }`,
	} {
		f := &goFile{path: name, set: token.NewFileSet()}
		if err := f.parse([]byte(text)); err != nil {
			t.Fatal(err)
		}
		files = append(files, f)
	}
	got := unusedNames("mula", files)
	if want := []string{"Hidden", "Lonely", "Never", "Same"}; !slices.Equal(got["a"], want) {
		t.Errorf("package a: got %q, want %q", got["a"], want)
	}
	if want := []string{"D", "E", "F", "I"}; !slices.Equal(got["b"], want) {
		t.Errorf("package b: got %q, want %q", got["b"], want)
	}
}
