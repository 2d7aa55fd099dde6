package strictyaml

import (
	"errors"
	"fmt"
	"math"
	"math/big"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml/ast"
	"github.com/goccy/go-yaml/token"

	"mula/internal/localpath"
	"mula/internal/quantity"
)

// An unmarshaler is a type that decodes itself from a scalar node. Anchors and aliases are resolved
// before the call. The error describes the problem with the value; the decoder adds file, line and
// field.
type unmarshaler interface {
	UnmarshalYAML(n ast.Node) error
}

// Decode decodes the file into v, a pointer to a struct with yaml tags. A field that is missing in
// the file or null keeps its value. An unknown field is an error that suggests the nearest known
// name. Numbers are decimal. A whole number whose field has the tag count:"suffix" may end with a
// suffix of [quantity.Count]. A list of texts may be written as a single text. A text that is a URL
// is an error, since most texts are paths, unless the field has the tag url:"ok".
//
// The tag was:"old" of a renamed field lists its old names, separated by commas. A file may use an
// old name; Decode then adds a warning to [File.Warnings]. [File.Has] and [File.Errorf] expect the
// new name in either case. A file that uses both names is an error.
//
// The error is an [Errors] with all problems of the file. Fields without a problem are set even if
// there is an error.
func (f *File) Decode(v any) error {
	if f.Empty() {
		return nil
	}
	d := decoder{top: f, file: f, base: "$", anchors: map[string][]*ast.AnchorNode{},
		active: map[*ast.AnchorNode]bool{}}
	body := f.body()
	ast.Walk(visitor(func(n ast.Node) {
		if a, ok := n.(*ast.AnchorNode); ok {
			name := a.Name.GetToken().Value
			d.anchors[name] = append(d.anchors[name], a)
		}
	}), body)
	d.root = reflect.TypeOf(v).Elem()
	d.value(reflect.ValueOf(v).Elem(), body, "$", "")
	return All(d.problems)
}

// Limits of alias expansion: values, and mappings that << merges.
const (
	maxAliased = 1_000_000
	maxMerges  = 10_000
)

type decoder struct {
	top      *File
	file     *File  // that has the value that is read now: top, or the value of one of its overrides
	base     string // path of that file's root
	root     reflect.Type
	anchors  map[string][]*ast.AnchorNode // by name, in the order of the file
	active   map[*ast.AnchorNode]bool     // anchors that are being read
	alias    *ast.AliasNode               // the outermost alias through which the current value was reached, or nil
	aliased  int                          // number of values that were read through aliases
	merges   int
	problems []error
}

// fail notes a problem with the value of the field at path.
func (d *decoder) fail(n ast.Node, path, format string, args ...any) {
	err := fmt.Errorf(format, args...)
	if d.alias != nil {
		n, err = d.alias, fmt.Errorf("%w (through the alias *%s)", err, d.alias.Value.GetToken().Value)
	}
	e := &Error{file: d.file.name, Path: path, decoding: true, err: err}
	if !d.file.setting {
		e.Line = line(n)
	}
	d.problems = append(d.problems, e)
}

// wrong notes that a value is not what its field needs.
func (d *decoder) wrong(n ast.Node, path, want string) {
	d.fail(n, path, "%s%s; it must be %s", subject(path), nodeName(n), want)
}

// subject begins a message about the value at a path.
func subject(path string) string {
	if path == "$" {
		return "the file is "
	}
	return strings.TrimPrefix(path, "$.") + " is "
}

// value reads n into dst, whose field has the tag.
func (d *decoder) value(dst reflect.Value, n ast.Node, path string, tag reflect.StructTag) {
	if d.alias != nil {
		if d.aliased++; d.aliased > maxAliased {
			if d.aliased == maxAliased+1 {
				d.fail(n, path, "aliases expand to more than %d values; use fewer aliases", maxAliased)
			}
			return
		}
	}
	switch n := n.(type) {
	case nil, *ast.NullNode:
		if _, below := d.top.override(path); below {
			break
		}
		if dst.Kind() == reflect.Pointer {
			dst.SetZero()
		}
		return
	case *ast.AnchorNode:
		d.active[n] = true
		d.value(dst, n.Value, path, tag)
		d.active[n] = false
		return
	case *ast.AliasNode:
		anchor := d.resolve(n, path)
		if anchor == nil {
			return
		}
		if d.alias == nil {
			d.alias = n
			defer func() { d.alias = nil }()
		}
		d.value(dst, anchor, path, tag)
		return
	case *ast.TagNode:
		d.fail(n, path, "the tag %s is not supported; write the value without it, and a text in quotation marks",
			n.Start.Value)
		return
	}
	if dst.Kind() == reflect.Pointer {
		inner := reflect.New(dst.Type().Elem())
		before := len(d.problems)
		if d.value(inner.Elem(), n, path, tag); len(d.problems) == before {
			dst.Set(inner)
		}
		return
	}
	if u, ok := dst.Addr().Interface().(unmarshaler); ok {
		if err := u.UnmarshalYAML(n); err != nil {
			d.fail(n, path, "%s: %w", strings.TrimPrefix(path, "$."), err)
		}
		return
	}
	switch k := dst.Kind(); {
	case k == reflect.Struct:
		d.structure(dst, n, path)
	case k == reflect.Map:
		d.mapping(dst, n, path, tag)
	case k == reflect.Slice:
		d.list(dst, n, path, tag)
	default:
		d.scalar(dst, n, path, tag)
	}
}

// resolve is the anchor that an alias names: the last before it in the file.
func (d *decoder) resolve(n *ast.AliasNode, path string) *ast.AnchorNode {
	name := n.Value.GetToken().Value
	var found *ast.AnchorNode
	for _, a := range d.anchors[name] {
		if a.GetToken().Position.Offset < n.GetToken().Position.Offset {
			found = a
		}
	}
	switch {
	case found == nil:
		d.fail(n, path, "the alias *%s has no anchor &%s before it", name, name)
	case d.active[found]:
		d.fail(n, path, "the alias *%s is within its own anchor", name)
		return nil
	}
	return found
}

// An entry is a key of a mapping and its value.
type entry struct {
	key   string
	at    ast.Node // the key
	value ast.Node
}

// entries returns the keys of a mapping, with the keys that << merges into it. ok is false if n is
// not a mapping.
func (d *decoder) entries(n ast.Node, path string) (list []entry, ok bool) {
	m, ok := n.(ast.MapNode)
	if !ok {
		return nil, false
	}
	seen := map[string]ast.Node{}
	var merged []entry
	for i := m.MapRange(); i.Next(); {
		if i.Key().IsMergeKey() {
			merged = append(merged, d.merge(i.Value(), path)...)
			continue
		}
		key, err := textOf(i.Key())
		if err != nil {
			d.fail(i.Key(), path, "the key %s: %w", nodeName(i.Key()), err)
			continue
		}
		if first, twice := seen[key]; twice {
			d.fail(i.Key(), join(path, key), "duplicate field %q, first set on line %d; remove one", key, line(first))
			continue
		}
		seen[key] = i.Key()
		list = append(list, entry{key, i.Key(), i.Value()})
	}
	for _, e := range merged {
		if _, own := seen[e.key]; !own {
			seen[e.key] = e.at
			list = append(list, e)
		}
	}
	return list, true
}

// merge are the entries of the mappings that a merge key names.
func (d *decoder) merge(n ast.Node, path string) []entry {
	if d.merges++; d.merges > maxMerges {
		if d.merges == maxMerges+1 {
			d.fail(n, path, "more than %d merged mappings; use fewer aliases", maxMerges)
		}
		return nil
	}
	switch n := n.(type) {
	case *ast.AnchorNode:
		return d.merge(n.Value, path)
	case *ast.AliasNode:
		if a := d.resolve(n, path); a != nil {
			d.active[a] = true
			defer func() { d.active[a] = false }()
			return d.merge(a.Value, path)
		}
		return nil
	case *ast.SequenceNode:
		var all []entry
		for _, v := range n.Values {
			all = append(all, d.merge(v, path)...)
		}
		return all
	}
	list, ok := d.entries(n, path)
	if !ok {
		d.fail(n, path, "<< merges mappings, but the value is %s", nodeName(n))
	}
	return list
}

// join returns the path of a key of a mapping.
func join(path, key string) string {
	if plainKey.MatchString(key) {
		return path + "." + key
	}
	return path + ".'" + key + "'"
}

var plainKey = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

func (d *decoder) structure(dst reflect.Value, n ast.Node, path string) {
	var list []entry
	ok := n == nil || n.Type() == ast.NullType // only overrides have values
	if !ok {
		list, ok = d.entries(n, path)
	}
	if !ok {
		example := ""
		if t := n.GetToken(); path != "$" && isScalar(n) {
			example = fmt.Sprintf(", such as %s: {%s: %s}", path[strings.LastIndexByte(path, '.')+1:],
				fields(dst.Type())[0], t.Value)
			if strings.HasSuffix(path, "]") {
				example = fmt.Sprintf(", such as - {%s: %s}", fields(dst.Type())[0], t.Value)
			}
		}
		d.wrong(n, path, "a mapping"+example)
		return
	}
	names := map[string]string{} // in the file, by the name of the field
	defer d.overrides(dst, path, names)
	for _, e := range list {
		f, field, ok := structField(dst, e.key)
		if !ok {
			d.fail(e.at, join(path, e.key), "unknown field %q%s", e.key, knownFields(e.key, dst.Type(), d.root))
			continue
		}
		name, _, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		if other, both := names[name]; both {
			old := e.key
			if old == name {
				old = other
			}
			d.fail(e.at, join(path, e.key), "%s and %s are the same field: %s is the old name of %s; remove "+
				"it", other, e.key,
				old, name)
			continue
		}
		names[name] = e.key
		if e.key != name {
			d.file.renamed(e.at, "$"+join(path, name)[len(d.base):], e.key)
		}
		if exact, _ := d.top.override(join(path, name)); exact == nil {
			d.value(f, e.value, join(path, name), field.Tag)
		}
	}
}

// overrides reads the fields of the struct at path that are overridden, or have overridden fields
// while the file does not name them. named has the fields that the file names.
func (d *decoder) overrides(dst reflect.Value, path string, named map[string]string) {
	for _, name := range fields(dst.Type()) {
		at := join(path, name)
		exact, below := d.top.override(at)
		_, done := named[name]
		if exact == nil && (!below || done) {
			continue
		}
		f, field, _ := structField(dst, name)
		if exact == nil {
			d.value(f, nil, at, field.Tag)
			continue
		}
		file, base, alias := d.file, d.base, d.alias
		d.file, d.base, d.alias = exact.value, at, nil
		d.value(f, exact.value.body(), at, field.Tag)
		d.file, d.base, d.alias = file, base, alias
	}
}

// structField returns the field of v with the name, or else the field that had it before.
func structField(v reflect.Value, name string) (reflect.Value, reflect.StructField, bool) {
	if f, field, ok := findField(v, func(_ reflect.StructField, current string) bool { return current == name }); ok {
		return f, field, true
	}
	return findField(v, func(field reflect.StructField, _ string) bool {
		return slices.Contains(strings.Split(field.Tag.Get("was"), ","), name)
	})
}

// findField returns the first field of v, or of a struct that is inlined, that is wanted.
func findField(v reflect.Value, wanted func(field reflect.StructField, name string) bool) (reflect.Value,
	reflect.StructField, bool) {
	for i := range v.NumField() {
		f := v.Type().Field(i)
		tag, options, _ := strings.Cut(f.Tag.Get("yaml"), ",")
		if options == "inline" {
			if found, field, ok := findField(v.Field(i), wanted); ok {
				return found, field, true
			}
		} else if tag != "-" && tag != "" && wanted(f, tag) {
			return v.Field(i), f, true
		}
	}
	return reflect.Value{}, reflect.StructField{}, false
}

func (d *decoder) mapping(dst reflect.Value, n ast.Node, path string, tag reflect.StructTag) {
	list, ok := d.entries(n, path)
	if !ok {
		d.wrong(n, path, "a mapping: {NAME: …}")
		return
	}
	m := reflect.MakeMap(dst.Type())
	for _, e := range list {
		v := reflect.New(dst.Type().Elem()).Elem()
		d.value(v, e.value, join(path, e.key), tag)
		m.SetMapIndex(reflect.ValueOf(e.key).Convert(dst.Type().Key()), v)
	}
	dst.Set(m)
}

func (d *decoder) list(dst reflect.Value, n ast.Node, path string, tag reflect.StructTag) {
	element := dst.Type().Elem()
	values := []ast.Node{n}
	if s, ok := n.(*ast.SequenceNode); ok {
		values = s.Values
	} else if element.Kind() != reflect.String || !isScalar(n) {
		example := ""
		if names := fields(element); names != nil {
			for i, name := range names {
				of := fieldType(element, name)
				if names[i] += ": …"; of.Kind() == reflect.Slice {
					names[i] = name + ": […]"
				}
			}
			example = ": - {" + strings.Join(names, ", ") + "}"
		} else {
			example = ": […, …]"
		}
		d.wrong(n, path, "a list"+example)
		return
	}
	list := reflect.MakeSlice(dst.Type(), len(values), len(values))
	for i, v := range values {
		d.value(list.Index(i), v, fmt.Sprintf("%s[%d]", path, i), tag)
	}
	dst.Set(list)
}

func isScalar(n ast.Node) bool {
	_, ok := n.(ast.ScalarNode)
	return ok
}

func (d *decoder) scalar(dst reflect.Value, n ast.Node, path string, tag reflect.StructTag) {
	want := kindName(dst.Type())
	switch k := dst.Kind(); {
	case !isScalar(n):
		d.wrong(n, path, want)
	case k == reflect.String:
		text, err := textOf(n)
		if err != nil {
			d.fail(n, path, "%s%s: %w", subject(path), nodeName(n), err)
			return
		}
		if err := localpath.Check(text); err != nil && tag.Get("url") != "ok" {
			d.fail(n, path, "%w", err)
			return
		}
		dst.SetString(text)
	case k == reflect.Bool:
		b, ok := n.(*ast.BoolNode)
		if !ok {
			d.wrong(n, path, want)
			return
		}
		dst.SetBool(b.Value)
	default:
		d.number(dst, n, path, tag)
	}
}

func (d *decoder) number(dst reflect.Value, n ast.Node, path string, tag reflect.StructTag) {
	text, want := scalarText(n), kindName(dst.Type())
	switch n.(type) {
	case *ast.BoolNode, *ast.LiteralNode:
		d.wrong(n, path, want)
		return
	case *ast.InfinityNode, *ast.NanNode:
		d.fail(n, path, "%s%s; it must be a finite number", subject(path), text)
		return
	}
	if tag.Get("count") != "" {
		want += ", which may end with k, M, G, B or T"
		v, err := quantity.Count(text)
		if err == nil {
			text = strconv.FormatInt(v, 10)
		} else if !errors.Is(err, quantity.ErrForm) {
			d.fail(n, path, "%s: %w", strings.TrimPrefix(path, "$."), err)
			return
		}
	}
	exact, err := quantity.Decimal(text)
	switch {
	case errors.Is(err, quantity.ErrForm):
		d.wrong(n, path, want)
		return
	case err != nil:
		d.fail(n, path, "%s: %w", strings.TrimPrefix(path, "$."), err)
		return
	}
	outside := func(low, high any) {
		d.fail(n, path, "%s%s; it must be between %v and %v", subject(path), text, low, high)
	}
	bits := dst.Type().Bits()
	if dst.CanFloat() {
		v, err := strconv.ParseFloat(text, bits)
		if err != nil || v == 0 && exact.Sign() != 0 { // overflow, or underflow to 0
			d.fail(n, path, "%s%s, which is out of range", subject(path), text)
			return
		}
		dst.SetFloat(v)
		return
	}
	if !exact.IsInt() {
		d.wrong(n, path, want)
		return
	}
	if dst.CanInt() {
		if v := exact.Num(); v.IsInt64() && !dst.OverflowInt(v.Int64()) {
			dst.SetInt(v.Int64())
			return
		}
		limit := int64(math.MaxInt64) >> (64 - bits)
		outside(-limit-1, limit)
		return
	}
	if v := exact.Num(); v.IsUint64() && !dst.OverflowUint(v.Uint64()) {
		dst.SetUint(v.Uint64())
		return
	}
	outside(0, new(big.Int).Sub(new(big.Int).Lsh(big.NewInt(1), uint(bits)), big.NewInt(1)))
}

// scalarText returns a scalar as written in the file, without quotation marks.
func scalarText(n ast.Node) string {
	switch n := n.(type) {
	case *ast.StringNode:
		return n.Value
	case *ast.LiteralNode:
		return n.Value.Value
	}
	return n.GetToken().Value
}

// textOf returns the text of a scalar. YAML has several notations for a number, so a number is
// accepted as text only in its usual notation: 1 may be a text, 01 and 1.0 may not.
func textOf(n ast.Node) (string, error) {
	text := scalarText(n)
	switch n := n.(type) {
	case *ast.StringNode, *ast.LiteralNode:
		return text, nil
	case *ast.IntegerNode, *ast.FloatNode, *ast.BoolNode:
		if fmt.Sprint(n.(ast.ScalarNode).GetValue()) == text {
			return text, nil
		}
	case *ast.MappingKeyNode:
		return textOf(n.Value)
	}
	if !isScalar(n) {
		return "", errors.New("it must be a text")
	}
	return "", fmt.Errorf("it is not a text in YAML; write %q in quotation marks", text)
}

// nodeName describes a value for the user.
func nodeName(n ast.Node) string {
	switch n := n.(type) {
	case ast.MapNode:
		return "a mapping"
	case *ast.SequenceNode:
		return "a list"
	case *ast.LiteralNode:
		return "a text of several lines"
	case *ast.MappingKeyNode:
		return nodeName(n.Value)
	}
	if t := n.GetToken(); t != nil {
		if t.Type == token.StringType || t.Type == token.SingleQuoteType || t.Type == token.DoubleQuoteType {
			return fmt.Sprintf("%.100q", t.Value)
		}
		return t.Value
	}
	return "a value"
}
