package strictyaml

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"github.com/goccy/go-yaml/ast"

	"mula/internal/suggest"
)

// An override is a value that replaces the file's value of a field.
type override struct {
	path  string // with the current names of fields
	value *File
}

// Override makes each setting, such as "optimizer.clip=0.5", replace the file's value of a field.
// [File.Decode], [File.Has], [File.Text] and [File.Errorf] then behave as if the file had that
// value. The key is the field's full name in v, a pointer to the struct that is decoded; old names
// of renamed fields are allowed. The value is YAML. A later setting replaces an earlier setting of
// the same field, and of fields within it. flag is the command-line flag that errors and warnings
// name. The error lists all invalid settings; valid settings apply nevertheless.
func (f *File) Override(v any, flag string, settings []string) error {
	var problems []error
	for _, setting := range settings {
		key, value, ok := strings.Cut(setting, "=")
		if !ok || key == "" {
			problems = append(problems, fmt.Errorf("%s %q: must be FIELD=VALUE, such as steps=100", flag, setting))
			continue
		}
		o, err := newOverride(reflect.TypeOf(v).Elem(), flag+" "+key, key, value)
		if err != nil {
			problems = append(problems, err)
			continue
		}
		f.overrides = slices.DeleteFunc(f.overrides, func(old *override) bool { return within(old.path, o.path) })
		f.overrides = append(f.overrides, o)
	}
	return All(problems)
}

// newOverride parses the value of a field of a struct of type root. Messages use name for the
// setting.
func newOverride(root reflect.Type, name, key, value string) (*override, error) {
	parsed, err := parse([]byte(value), name, true)
	if err != nil {
		return nil, err
	}
	o := &override{path: "$", value: parsed}
	here := root
	for part := range strings.SplitSeq(key, ".") {
		for here.Kind() == reflect.Pointer {
			here = here.Elem()
		}
		unknown := func(at, hint string) (*override, error) {
			return nil, &Error{file: name, Path: at, decoding: true, err: fmt.Errorf("unknown field %q%s", key, hint)}
		}
		whole := func(at string, t reflect.Type) (*override, error) {
			parent := strings.TrimPrefix(at, "$.")
			return unknown(at, fmt.Sprintf("; %s is %s: set it as a whole, as in %s=…", parent, kindName(t), parent))
		}
		if here.Kind() != reflect.Struct {
			return whole(o.path, here)
		}
		part, _, indexed := strings.Cut(part, "[")
		_, field, ok := structField(reflect.New(here).Elem(), part)
		if !ok {
			hint := knownFields(part, here, root)
			if near := suggest.Nearest(part, fields(here)); near != "" {
				hint = fmt.Sprintf("; did you mean %q?", strings.TrimPrefix(join(o.path, near), "$."))
			}
			return unknown(join(o.path, part), hint)
		}
		if indexed {
			return whole(join(o.path, part), field.Type)
		}
		current, _, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		o.path = join(o.path, current)
		if current != part {
			parsed.warnings = append(parsed.warnings, warning{text: fmt.Sprintf("field %s is now called "+
				"%s", part, current)})
		}
		here = field.Type
	}
	var reference ast.Node
	ast.Walk(visitor(func(n ast.Node) {
		switch n.(type) {
		case *ast.AnchorNode, *ast.AliasNode:
			reference = n
		}
	}), parsed.body())
	if reference != nil {
		return nil, fmt.Errorf("%s: anchors and aliases cannot be used here; write the value itself", name)
	}
	return o, nil
}

// body returns the content of the document, or a null node.
func (f *File) body() ast.Node {
	if len(f.tree.Docs) == 0 || f.tree.Docs[0].Body == nil {
		return &ast.NullNode{BaseNode: &ast.BaseNode{}}
	}
	return f.tree.Docs[0].Body
}

// override returns the setting that replaces the value at a path, or nil. below reports whether a
// setting replaces a value within the value at the path.
func (f *File) override(path string) (exact *override, below bool) {
	for _, o := range f.overrides {
		if o.path == path {
			exact = o
		} else if within(o.path, path) {
			below = true
		}
	}
	return exact, below
}

// source returns the file that has the value at a path, and the path of the value in that file: f
// itself, or the setting that replaces the value or a value that contains it.
func (f *File) source(path string) (*File, string) {
	var nearest *override
	for _, o := range f.overrides {
		if within(path, o.path) && (nearest == nil || len(o.path) > len(nearest.path)) {
			nearest = o
		}
	}
	if nearest == nil {
		return f, path
	}
	return nearest.value, "$" + path[len(nearest.path):]
}
