// Package strictyaml reads configuration files: every field must be known, and every message names file and line.
package strictyaml

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/goccy/go-yaml"
	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/parser"
	"github.com/goccy/go-yaml/token"

	"mula/internal/suggest"
)

// A File is a parsed YAML file.
type File struct {
	name string
	data []byte
	tree *ast.File
}

// maxSize bounds a configuration file. Two thousand sources take a few hundred kilobytes.
const maxSize = 64 << 20

// maxDepth bounds how deep brackets are nested. The YAML library takes time that grows with the square of it.
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

// Parse parses a file of one YAML document, or none. name stands for the file in messages.
func Parse(data []byte, name string) (*File, error) {
	if len(data) > maxSize {
		return nil, fmt.Errorf("%s: larger than %d MiB, which no configuration is", name, maxSize>>20)
	}
	data = bytes.TrimPrefix(data, []byte("\ufeff"))
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
			return nil, fmt.Errorf("%s:%d: brackets are nested more than %d deep", name, 1+bytes.Count(data[:i], []byte("\n")), maxDepth)
		}
	}
	f := &File{name: name, data: data}
	tree, err := parser.ParseBytes(data, 0)
	if err != nil {
		return nil, f.explain(err, nil)
	}
	if len(tree.Docs) > 1 {
		return nil, fmt.Errorf("%s:%d: a second YAML document begins; want one", name, line(tree.Docs[1]))
	}
	f.tree = tree
	return f, nil
}

// Empty says whether the file has nothing but comments and white space.
func (f *File) Empty() bool {
	return len(f.tree.Docs) == 0 || f.tree.Docs[0].Body == nil || f.tree.Docs[0].Body.Type() == ast.NullType
}

// Decode reads the file into v, a pointer to a struct with yaml tags. A field of the file that the struct does not have is an error, which
// names the nearest one that it has. Of an empty file v stays as it is.
func (f *File) Decode(v any) error {
	if f.Empty() {
		return nil
	}
	of := reflect.TypeOf(v).Elem()
	err := yaml.NewDecoder(bytes.NewReader(f.data), yaml.Strict()).Decode(v)
	if err != nil && !errors.Is(err, io.EOF) {
		return f.explain(err, of)
	}
	return f.fractions(of)
}

// fractions refuses numbers with a fraction where a whole one belongs: the library would cut them off.
func (f *File) fractions(of reflect.Type) (err error) {
	ast.Walk(visitor(func(n ast.Node) {
		if n.Type() != ast.FloatType && n.Type() != ast.StringType || err != nil { // 15e-1 is a string to the parser, a number to the decoder
			return
		}
		if number, perr := strconv.ParseFloat(n.GetToken().Value, 64); perr != nil || number == math.Trunc(number) {
			return
		}
		t := typeAt(of, n.GetPath())
		for t != nil && t.Kind() == reflect.Pointer {
			t = t.Elem()
		}
		if t != nil && t.Kind() >= reflect.Int && t.Kind() <= reflect.Uint64 {
			err = fmt.Errorf("%s:%d: %q is not %s", f.name, line(n), n.GetToken().Value, kindName(t))
		}
	}), f.tree.Docs[0])
	return err
}

// DecodeLoosely reads those fields of the file that v has, and passes over the others.
func (f *File) DecodeLoosely(v any) error {
	if f.Empty() {
		return nil
	}
	if err := yaml.Unmarshal(f.data, v); err != nil {
		return f.explain(err, reflect.TypeOf(v).Elem())
	}
	return nil
}

// Has says whether the file gives a value other than null at a path such as "$.sources[0].weight". A nil File gives none.
func (f *File) Has(path string) bool {
	n := f.at(path)
	return n != nil && n.Type() != ast.NullType
}

// Errorf makes an error about the value at a path, with its line if the file has that value. Of a nil File, which stands for a
// configuration that comes from no file, it is the message alone.
func (f *File) Errorf(path, format string, args ...any) error {
	err := fmt.Errorf(format, args...)
	if f == nil {
		return err
	}
	if n := f.at(path); n != nil {
		return fmt.Errorf("%s:%d: %w", f.name, line(n), err)
	}
	return fmt.Errorf("%s: %w", f.name, err)
}

// at is the node at a path, nil if there is none.
func (f *File) at(path string) ast.Node {
	if f == nil || f.Empty() {
		return nil
	}
	p, err := yaml.PathString(path)
	if err != nil {
		return nil
	}
	n, err := p.FilterFile(f.tree)
	if err != nil {
		return nil
	}
	return n
}

// At gives an error of an UnmarshalYAML method the place of the node, in the form that the decoder passes through.
func At(n ast.Node, err error) error {
	return &yaml.SyntaxError{Message: err.Error(), Token: n.GetToken()}
}

// DidYouMean ends a message about an unknown word with the nearest known one, or with all of them if they are few.
func DidYouMean(word string, known []string) string {
	if near := suggest.Nearest(word, known); near != "" {
		return fmt.Sprintf("; did you mean %q?", near)
	}
	if len(known) > 0 && len(known) <= 40 {
		return "; known are " + strings.Join(known, ", ")
	}
	return ""
}

// line is the line on which a node begins, from 1.
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

// explain puts file and line in front of an error of the YAML library, in words that do not need Go to be understood. of is the type that
// was decoded into, if it got that far.
func (f *File) explain(err error, of reflect.Type) error {
	var located yaml.Error
	if !errors.As(err, &located) || located.GetToken() == nil || located.GetToken().Position == nil {
		return fmt.Errorf("%s: %w", f.name, err)
	}
	t := located.GetToken()
	at := fmt.Sprintf("%s:%d", f.name, t.Position.Line)
	var unknown *yaml.UnknownFieldError
	var mismatch *yaml.TypeError
	var overflow *yaml.OverflowError
	var shape *yaml.UnexpectedNodeTypeError
	switch {
	case errors.As(err, &unknown):
		return fmt.Errorf("%s: unknown field %q%s", at, t.Value, f.knownFields(t, of))
	case errors.As(err, &mismatch):
		return fmt.Errorf("%s: %s is not %s", at, valueName(t), kindName(mismatch.DstType))
	case errors.As(err, &overflow):
		return fmt.Errorf("%s: %s is beyond what the field can hold: %s", at, t.Value, kindName(overflow.DstType))
	case errors.As(err, &shape) && shape.Expected == ast.MappingType:
		return fmt.Errorf("%s: %s is not a list of named fields", at, valueName(t))
	case errors.As(err, &shape) && shape.Expected == ast.SequenceType:
		return fmt.Errorf("%s: %s is not a list", at, valueName(t))
	}
	message := []rune(located.GetMessage())
	if len(message) > 200 { // it may quote the file
		message = append(message[:200:200], '…')
	}
	return fmt.Errorf("%s: %s", at, string(message))
}

// knownFields says which field the unknown one at t may have been meant to be: one that may stand there, or else one that belongs elsewhere
// in the file, by its full name.
func (f *File) knownFields(t *token.Token, of reflect.Type) string {
	here := fields(typeAt(of, f.parentPath(t)))
	if suggest.Nearest(t.Value, here) == "" {
		full := fullNames(of, "")
		last := make([]string, len(full))
		for i, name := range full {
			last[i] = name[strings.LastIndexByte(name, '.')+1:]
		}
		if i := slices.Index(last, suggest.Nearest(t.Value, last)); i >= 0 {
			return fmt.Sprintf("; did you mean %q?", full[i])
		}
	}
	return DidYouMean(t.Value, here)
}

// parentPath is the path of the mapping that has t as a key.
func (f *File) parentPath(t *token.Token) string {
	var path string
	ast.Walk(visitor(func(n ast.Node) {
		if k := n.GetToken(); k != nil && k.Position != nil && k.Position.Line == t.Position.Line && k.Position.Column == t.Position.Column {
			path = n.GetPath()
		}
	}), f.tree.Docs[0])
	return path[:max(0, strings.LastIndexByte(path, '.'))]
}

type visitor func(ast.Node)

func (v visitor) Visit(n ast.Node) ast.Visitor {
	v(n)
	return v
}

// typeAt follows a path such as "$.sources[0]" from a type; nil if it leads nowhere.
func typeAt(t reflect.Type, path string) reflect.Type {
	steps := strings.FieldsFunc(strings.TrimPrefix(path, "$"), func(r rune) bool { return r == '.' || r == '[' })
	for _, step := range steps {
		for t != nil && t.Kind() == reflect.Pointer {
			t = t.Elem()
		}
		switch {
		case t == nil:
			return nil
		case strings.HasSuffix(step, "]") && (t.Kind() == reflect.Slice || t.Kind() == reflect.Array), t.Kind() == reflect.Map:
			t = t.Elem()
		default:
			t = fieldType(t, step)
		}
	}
	return t
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

// fields are the names of the fields of a struct.
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

// fullNames are the names of all fields of a struct and of the structs in it.
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

// valueName is what begins at a token, in words of the user's, where it is no value but the sign of several.
func valueName(t *token.Token) string {
	switch t.Type {
	case token.MappingValueType, token.MappingStartType:
		return "a mapping (name: value)"
	case token.SequenceEntryType, token.SequenceStartType:
		return "a list"
	case token.LiteralType, token.FoldedType:
		return "a text of several lines"
	}
	return strconv.Quote(t.Value)
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
	return "a list of named fields"
}
