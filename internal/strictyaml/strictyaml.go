// Package strictyaml reads configuration files. Unknown fields are errors, and every message has
// the file and the line.
package strictyaml

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"

	"mula/internal/suggest"
)

// A File is a parsed YAML file.
type File struct {
	name    string
	data    []byte
	tree    *ast.File
	setting bool // the value of a command-line setting, which messages name without a line

	oldNames  map[string]string // of fields, by the path with the new names
	warnings  []warning
	overrides []*override // at most one for each path
}

// A warning is a remark about a line of a file. The file is valid nevertheless.
type warning struct {
	line int
	text string
}

// maxSize is the maximum size of a configuration file in bytes. Two thousand sources need a few
// hundred kilobytes.
const maxSize = 64 << 20

// maxDepth is the maximum nesting depth of brackets. The YAML library needs time quadratic in the
// depth.
const maxDepth = 100

// Read reads and parses the file at path.
func Read(path string) (*File, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxSize+1))
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	return Parse(data, path)
}

// Parse parses a file with at most one YAML document. name is the file's name in messages.
func Parse(data []byte, name string) (*File, error) { return parse(data, name, false) }

func parse(data []byte, name string, setting bool) (*File, error) {
	f := &File{name: name, data: data, setting: setting}
	if len(data) > maxSize {
		return nil, fmt.Errorf("%s: larger than %d MiB; a configuration file must be smaller", name, maxSize>>20)
	}
	data = bytes.TrimPrefix(data, []byte("\ufeff"))
	f.data = data
	if !utf8.Valid(data) {
		return nil, fmt.Errorf("%s: not UTF-8 text", name)
	}
	depth := 0
	for i, c := range data {
		switch c {
		case '[', '{':
			depth++
		case ']', '}':
			depth = max(0, depth-1)
		}
		if depth > maxDepth {
			return nil, fmt.Errorf("%s: brackets are nested more than %d deep",
				f.position(1+bytes.Count(data[:i], []byte("\n"))), maxDepth)
		}
	}
	tree, err := parser.ParseBytes(data, 0)
	if err != nil {
		return nil, f.explain(err)
	}
	if len(tree.Docs) > 1 {
		return nil, fmt.Errorf("%s: second YAML document; only one is allowed", f.position(line(tree.Docs[1])))
	}
	f.tree = tree
	return f, nil
}

// position returns the name of the file with a line, as messages begin.
func (f *File) position(line int) string {
	if f.setting || line == 0 {
		return f.name
	}
	return fmt.Sprintf("%s:%d", f.name, line)
}

// Empty reports whether the file has only comments and white space, and no overridden values.
func (f *File) Empty() bool { return len(f.overrides) == 0 && f.blank() }

// blank reports whether the file itself has only comments and white space.
func (f *File) blank() bool {
	return len(f.tree.Docs) == 0 || f.tree.Docs[0].Body == nil || f.tree.Docs[0].Body.Type() == ast.NullType
}

// Fields returns all fields of the file, known or not. A nested mapping is a map[string]any, too.
func (f *File) Fields() (map[string]any, error) {
	var fields map[string]any
	if f.blank() {
		return nil, nil
	}
	if err := yaml.Unmarshal(f.data, &fields); err != nil {
		return nil, f.explain(err)
	}
	return fields, nil
}

// Warnings returns the warnings about a file that was read, each with file, line and text, sorted
// by line. A nil File has no warnings.
func (f *File) Warnings() []string {
	if f == nil {
		return nil
	}
	var out []string
	slices.SortStableFunc(f.warnings, func(a, b warning) int { return a.line - b.line })
	for _, w := range f.warnings {
		out = append(out, fmt.Sprintf("%s: %s", f.position(w.line), w.text))
	}
	for _, o := range f.overrides {
		out = append(out, o.value.Warnings()...)
	}
	return slices.Compact(out)
}

// Warnf adds a warning about the value at path, such as an old name of a choice. A nil File ignores
// it.
func (f *File) Warnf(path, format string, args ...any) {
	if f == nil {
		return
	}
	w := warning{line: 1, text: fmt.Sprintf(format, args...)}
	if n := f.at(path); n != nil {
		w.line = line(n)
	}
	from, _ := f.source(path)
	from.warnings = append(from.warnings, w)
}

// renamed records that the file uses an old name of the field at path.
func (f *File) renamed(key ast.Node, path, old string) {
	if f.oldNames == nil {
		f.oldNames = map[string]string{}
	}
	f.oldNames[path] = old
	name := path[strings.LastIndexByte(path, '.')+1:]
	f.warnings = append(f.warnings, warning{line(key), fmt.Sprintf("field %s is now called %s", old, name)})
}

// written returns path with the names that the file uses.
func (f *File) written(path string) string {
	if len(f.oldNames) == 0 {
		return path
	}
	for end := len(path); end > 0; end = strings.LastIndexAny(path[:end], ".[") {
		if old, ok := f.oldNames[path[:end]]; ok {
			parent := path[:strings.LastIndexByte(path[:end], '.')]
			path = join(parent, old) + path[end:]
			end = len(parent)
		}
	}
	return path
}

// Text returns the text at path, "" if the file has no text there.
func (f *File) Text(path string) string {
	if n, ok := f.at(path).(*ast.StringNode); ok {
		return n.Value
	}
	return ""
}

// Has reports whether the file has a value other than null at path, such as "$.sources[0].weight".
// A nil File has no values.
func (f *File) Has(path string) bool {
	n := f.at(path)
	return n != nil && n.Type() != ast.NullType
}

// Errorf returns an error about the value at path. The error has the line of that value, or of the
// closest containing value if the file does not have it. A nil File is a configuration without a
// file, and the error is the message alone.
func (f *File) Errorf(path, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	if f == nil {
		return err
	}
	from, _ := f.source(path)
	e := &Error{file: from.name, Path: path, err: err}
	if from.setting {
		return e
	}
	for at := path; at != "$"; at = at[:max(1, strings.LastIndexAny(at, ".["))] {
		if n := f.at(at); n != nil {
			e.Line = line(n)
			break
		}
	}
	return e
}

// at returns the node at path, nil if the file does not have it.
func (f *File) at(path string) ast.Node {
	if f == nil {
		return nil
	}
	if f, path = f.source(path); f.blank() {
		return nil
	}
	p, err := yaml.PathString(f.written(path))
	if err != nil {
		return nil
	}
	n, err := p.FilterFile(f.tree)
	if err != nil {
		return nil
	}
	return n
}

// DidYouMean returns the end of a message about an unknown word: the nearest known word, or else
// all known words if there are few.
func DidYouMean(word string, known []string) string {
	if near := suggest.Nearest(word, known); near != "" {
		return fmt.Sprintf("; did you mean %q?", near)
	}
	if len(known) > 0 && len(known) <= 40 {
		return "; known are " + strings.Join(known, ", ")
	}
	return ""
}

// line returns the line on which a node starts, from 1.
func line(n ast.Node) int {
	switch m := n.(type) {
	case *ast.MappingNode:
		if len(m.Values) > 0 {
			n = m.Values[0].Key // the token of a mapping is a colon further on
		}
	case *ast.DocumentNode:
		if m.Start != nil {
			return m.Start.Position.Line
		}
	}
	if t := n.GetToken(); t != nil && t.Position != nil {
		return t.Position.Line
	}
	return 1
}

// explain adds file and line to an error of the YAML library.
func (f *File) explain(err error) error {
	var located yaml.Error
	if !errors.As(err, &located) || located.GetToken() == nil || located.GetToken().Position == nil {
		return fmt.Errorf("%s: %w", f.name, err)
	}
	message := []rune(located.GetMessage())
	if len(message) > 200 { // it may quote the file
		message = append(message[:200:200], '…')
	}
	return fmt.Errorf("%s: %s", f.position(located.GetToken().Position.Line), string(message))
}

// knownFields suggests a field for an unknown name: a field of this name elsewhere in the file, or
// else a similar one of the struct here, or else a similar one elsewhere. It names the latter in
// full.
func knownFields(name string, here, root reflect.Type) string {
	known, full := fields(here), fullNames(root, "")
	last := make([]string, len(full))
	for i, name := range full {
		last[i] = name[strings.LastIndexByte(name, '.')+1:]
	}
	i := slices.Index(last, name)
	if i < 0 && suggest.Nearest(name, known) == "" {
		i = slices.Index(last, suggest.Nearest(name, last))
	}
	switch {
	case i < 0:
		return DidYouMean(name, known)
	case full[i] == name:
		return "; it belongs at the top level of the file"
	}
	return fmt.Sprintf("; did you mean %q?", full[i])
}

type visitor func(ast.Node)

func (v visitor) Visit(n ast.Node) ast.Visitor {
	v(n)
	return v
}

func fieldType(t reflect.Type, name string) reflect.Type {
	if t.Kind() != reflect.Struct {
		return nil
	}
	for i := range t.NumField() {
		f := t.Field(i)
		tag, options, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if options == "inline" {
			if found := fieldType(f.Type, name); found != nil {
				return found
			}
		} else if tag == name && tag != "-" {
			return f.Type
		}
	}
	return nil
}

// fields returns the names of the fields of a struct.
func fields(t reflect.Type) []string {
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == nil || t.Kind() != reflect.Struct {
		return nil
	}
	var names []string
	for i := range t.NumField() {
		f := t.Field(i)
		tag, options, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if options == "inline" {
			names = append(names, fields(f.Type)...)
		} else if tag != "" && tag != "-" {
			names = append(names, tag)
		}
	}
	return names
}

// fullNames returns the names of all fields of a struct and of its nested structs.
func fullNames(t reflect.Type, prefix string) []string {
	var names []string
	for _, name := range fields(t) {
		names = append(names, prefix+name)
		if inner := fieldType(t, name); inner.Kind() == reflect.Struct {
			names = append(names, fullNames(inner, prefix+name+".")...)
		}
	}
	return names
}

// Names returns the full names of all fields of a struct, such as "layout.ep". v is a pointer to
// the struct. Fields in lists are not among them.
func Names(v any) []string {
	t := reflect.TypeOf(v).Elem()
	return slices.DeleteFunc(fullNames(t, ""), func(name string) bool {
		here := t
		for part := range strings.SplitSeq(name, ".") {
			here = fieldType(here, part)
		}
		return here.Kind() == reflect.Struct
	})
}

// OldNames returns the full names that fields of a struct had before, such as "layout.dp", with
// their current full names. v is a pointer to the struct. Fields in lists are not among them.
func OldNames(v any) map[string]string {
	names := map[string]string{}
	oldNames(reflect.TypeOf(v).Elem(), []string{""}, "", names)
	return names
}

// oldNames adds the names of the fields of t. prefixes are the current prefix and prefixes with old
// names.
func oldNames(t reflect.Type, prefixes []string, current string, names map[string]string) {
	for i := range t.NumField() {
		f := t.Field(i)
		tag, options, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if options == "inline" {
			oldNames(f.Type, prefixes, current, names)
			continue
		}
		if tag == "" || tag == "-" {
			continue
		}
		own := []string{tag}
		if was := f.Tag.Get("was"); was != "" {
			own = append(own, strings.Split(was, ",")...)
		}
		var all []string
		for _, prefix := range prefixes {
			for _, name := range own {
				all = append(all, prefix+name+".")
				if prefix+name != current+tag {
					names[prefix+name] = current + tag
				}
			}
		}
		if f.Type.Kind() == reflect.Struct {
			oldNames(f.Type, all, current+tag+".", names)
		}
	}
}

func kindName(t reflect.Type) string {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch {
	case t.Kind() >= reflect.Int && t.Kind() <= reflect.Int64:
		return "a whole number"
	case t.Kind() >= reflect.Uint && t.Kind() <= reflect.Uint64:
		return "a whole number of 0 or more"
	case t.Kind() == reflect.Float32 || t.Kind() == reflect.Float64:
		return "a number"
	case t.Kind() == reflect.Bool:
		return "true or false"
	case t.Kind() == reflect.String:
		return "a text"
	case t.Kind() == reflect.Slice || t.Kind() == reflect.Array:
		return "a list"
	}
	return "a mapping"
}

// Fields returns the values of the fields of struct v as JSON text, by full name, such as
// "optimizer.name". It omits fields that a file cannot set, and zero fields with the option
// omitempty.
func Fields(v any) map[string]string {
	into := map[string]string{}
	addFields(reflect.ValueOf(v), "", into)
	return into
}

func addFields(v reflect.Value, prefix string, into map[string]string) {
	for i := range v.NumField() {
		tag, options, _ := strings.Cut(v.Type().Field(i).Tag.Get("yaml"), ",")
		f := reflect.Indirect(v.Field(i))
		switch {
		case options == "inline":
			addFields(f, prefix, into)
		case tag == "" || options == "omitempty" && v.Field(i).IsZero():
		case f.Kind() == reflect.Struct:
			addFields(f, prefix+tag+".", into)
		default:
			text, err := json.Marshal(f.Interface())
			if err != nil {
				panic(err) // numbers and strings of a validated configuration
			}
			into[prefix+tag] = string(text)
		}
	}
}
