package main

import (
	"bytes"
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// thirdPartyName is the file in each package that has the licence texts of the program's modules.
const thirdPartyName = "THIRD-PARTY-LICENSES"

var (
	grant = regexp.MustCompile(`(?i)^(licen[cs]e|copying|unlicense)`)
	// legal also matches files that a licence asks to pass on.
	legal    = regexp.MustCompile(`(?i)^(licen[cs]e|copying|unlicense|notice|patents)([-._].*)?$`)
	codeFile = regexp.MustCompile(`\.(go|s|c|h|py|json|ya?ml)$`)
)

// A component is third-party code in a program: a module, or Go's standard library.
type component struct {
	name    string
	version string
	files   []file
}

// thirdParty returns the licence texts of all third-party code in a program: the modules that the
// go command recorded in it, and Go's standard library.
func (b *build) thirdParty(p platform, static bool) (file, error) {
	name := b.binary(p, static)
	info, err := buildinfo.ReadFile(name)
	if err != nil {
		return file{}, fmt.Errorf("%s: %w", name, err)
	}
	folders, err := b.packageFolders(p, static)
	if err != nil {
		return file{}, err
	}
	goroot, err := command(b.root, nil, "go", "env", "GOROOT")
	if err != nil {
		return file{}, err
	}
	root := strings.TrimSpace(string(goroot))
	texts, err := legalFiles(root, []string{root})
	if err != nil {
		return file{}, fmt.Errorf("the Go distribution: %w", err)
	}
	components := []component{{"Go's standard library and runtime", info.GoVersion, texts}}
	for _, m := range info.Deps {
		module, ok := folders[m.Path]
		if !ok {
			return file{}, fmt.Errorf("%s: go list does not know module %s of this program", name, m.Path)
		}
		texts, err := legalFiles(module.root, module.packages)
		if err != nil {
			return file{}, fmt.Errorf("module %s: %w", m.Path, err)
		}
		if m.Replace != nil {
			m = m.Replace
		}
		components = append(components, component{m.Path, m.Version, texts})
	}
	return file{thirdPartyName, 0o644, licenseText(components)}, nil
}

// moduleFolders are the folders of a module, and of its packages that are in a program.
type moduleFolders struct {
	root     string
	packages []string
}

// packageFolders returns the folders of all modules of a program, by the path of the module.
func (b *build) packageFolders(p platform, static bool) (map[string]moduleFolders, error) {
	text, err := command(b.root, goEnvironment(p), "go", append(append([]string{"list"}, tags(static)...), "-deps",
		"-json=Dir,Module", "./cli/mula")...)
	if err != nil {
		return nil, err
	}
	out := make(map[string]moduleFolders)
	decoder := json.NewDecoder(bytes.NewReader(text))
	for {
		var listed struct {
			Dir    string
			Module *struct {
				Path string
				Dir  string
				Main bool
			}
		}
		if err := decoder.Decode(&listed); errors.Is(err, io.EOF) {
			return out, nil
		} else if err != nil {
			return nil, fmt.Errorf("output of go list: %w", err)
		}
		if m := listed.Module; m != nil && !m.Main {
			out[m.Path] = moduleFolders{m.Dir, append(out[m.Path].packages, listed.Dir)}
		}
	}
}

// legalFiles reads the licences and notices in folders of a module and in all folders between them
// and the module's root. A module must have a licence.
func legalFiles(root string, folders []string) ([]file, error) {
	seen := make(map[string]bool)
	var out []file
	licensed := false
	for _, folder := range append([]string{root}, folders...) {
		rel, err := filepath.Rel(root, folder)
		if err != nil {
			return nil, err
		}
		for dir := filepath.ToSlash(rel); !seen[dir]; dir = path.Dir(dir) {
			seen[dir] = true
			entries, err := os.ReadDir(filepath.Join(root, filepath.FromSlash(dir)))
			if err != nil {
				return nil, err
			}
			for _, e := range entries {
				if e.IsDir() || !legal.MatchString(e.Name()) || codeFile.MatchString(e.Name()) {
					continue
				}
				name := path.Join(dir, e.Name())
				text, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(name)))
				if err != nil {
					return nil, err
				}
				licensed = licensed || grant.MatchString(e.Name()) && len(bytes.TrimSpace(text)) > 0
				out = append(out, file{name, 0o644, text})
			}
		}
	}
	if !licensed {
		return nil, fmt.Errorf("%s: no licence file; the program cannot be distributed without one", root)
	}
	slices.SortFunc(out, byName)
	return out, nil
}

// licenseText joins the texts of components, in the order of their names.
func licenseText(components []component) []byte {
	slices.SortFunc(components, func(a, b component) int { return strings.Compare(a.name, b.name) })
	rule := strings.Repeat("=", 80) + "\n"
	var out bytes.Buffer
	out.WriteString("The program mula contains the software listed here. The licences follow the list.\n\n")
	for _, c := range components {
		fmt.Fprintf(&out, "  %s %s\n", c.name, c.version)
	}
	for _, c := range components {
		for _, f := range c.files {
			fmt.Fprintf(&out, "\n%s%s %s\n%s\n%s\n", rule, c.name, c.version, f.name, rule)
			text := bytes.ReplaceAll(f.data, []byte("\r\n"), []byte("\n"))
			out.Write(bytes.TrimRight(text, " \t\n"))
			out.WriteByte('\n')
		}
	}
	return out.Bytes()
}
