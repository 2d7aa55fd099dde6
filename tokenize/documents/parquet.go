package documents

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"

	"github.com/apache/arrow-go/v18/parquet"
	"github.com/apache/arrow-go/v18/parquet/metadata"
	"github.com/apache/arrow-go/v18/parquet/schema"
)

// maxFooter is the maximum size of a file's metadata.
const maxFooter = 512 << 20

// parquetMeta is the required metadata of a file.
type parquetMeta struct {
	file     *metadata.FileMetaData
	text, id *parquetColumn // id is nil if the file has none
	groups   []parquetGroup
	end      int64 // of the row groups: where the metadata starts
}

// A parquetColumn is a column to read.
type parquetColumn struct {
	name     string
	leaf     int // its index among the columns of a row group
	kind     parquet.Type
	levels   int16 // of definition: the number of nullable nodes among the column and its ancestors
	unsigned bool  // of numbers
}

type parquetGroup struct {
	first int64 // row of the file, from 0
	rows  int64
	start int64 // the first byte of its columns
}

// inMetadata adds to a fault that it is in the metadata of a file, unless it is an advice.
func inMetadata(format string, err error) error {
	if errors.As(err, new(advice)) {
		return err
	}
	return fmt.Errorf("reading the metadata at the end of the %s file: %w", format, err)
}

// readParquetMeta reads the end of a file. Its errors describe the fault of the file.
func readParquetMeta(file io.ReaderAt, size int64, o Options, paths [2][]string) (*parquetMeta, error) {
	var tail [8]byte
	if size < 12 {
		return nil, io.ErrUnexpectedEOF
	}
	if _, err := file.ReadAt(tail[:], size-8); err != nil {
		return nil, err
	}
	switch string(tail[4:]) {
	case "PAR1":
	case "PARE":
		return nil, advise("the file is encrypted, which is not supported; decrypt it first")
	default:
		return nil, fmt.Errorf("a Parquet file must end with \"PAR1\", but this file ends with %q: "+
			"%w", tail[4:], io.ErrUnexpectedEOF)
	}
	length := int64(binary.LittleEndian.Uint32(tail[:]))
	if length > size-12 || length > maxFooter {
		return nil, fmt.Errorf("the end of the file says that its metadata has %d bytes, but the file has %d "+
			"bytes", length, size)
	}
	footer := make([]byte, length)
	if _, err := file.ReadAt(footer, size-8-length); err != nil {
		return nil, err
	}
	m := &parquetMeta{end: size - 8 - length}
	err := guarded(func() (err error) {
		if m.file, err = metadata.NewFileMetaData(footer, nil); err != nil {
			return err
		}
		m.file.SetSourceFileSize(size)
		if err := m.find(o, paths); err != nil {
			return err
		}
		return m.findGroups()
	})
	if err != nil {
		return nil, err
	}
	return m, nil
}

// find finds the columns of the text and the id.
func (m *parquetMeta) find(o Options, paths [2][]string) error {
	found := [2]*schema.Column{}
	leaves := [2]int{}
	var texts []string // columns that may be the text
	for leaf := range m.file.Schema.NumColumns() {
		c := m.file.Schema.Column(leaf)
		path := c.ColumnPath()
		if c.PhysicalType() == parquet.Types.ByteArray && c.MaxRepetitionLevel() == 0 && len(texts) < 20 {
			texts = append(texts, joinPath(path))
		}
		for i := range paths {
			if slices.Equal(path, paths[i]) {
				found[i], leaves[i] = c, leaf
			}
		}
	}
	text, id := found[textField], found[idField]
	switch group := m.groupAt(paths[textField]); {
	case text == nil && group != "":
		return wrongText(paths, group, texts)
	case text == nil:
		return noText(paths, texts)
	case text.MaxRepetitionLevel() > 0:
		return advise("the column %q is inside a list, and a document has one text; select another column with "+
			"--text-field", joinPath(paths[textField]))
	case text.PhysicalType() != parquet.Types.ByteArray:
		return wrongText(paths, strings.ToLower(text.PhysicalType().String()), texts)
	}
	m.text = newParquetColumn(text, leaves[textField])
	switch group := m.groupAt(paths[idField]); {
	case id == nil && o.ID != "" && group != "":
		return wrongID(paths, group)
	case id == nil && o.ID != "":
		return noID(paths, texts)
	case id == nil:
		return nil
	case id.MaxRepetitionLevel() > 0:
		return advise("the column %q of the ids is inside a list; select another column with --id-field",
			joinPath(paths[idField]))
	}
	m.id = newParquetColumn(id, leaves[idField])
	number := m.id.kind == parquet.Types.Int32 || m.id.kind == parquet.Types.Int64
	if logical := id.LogicalType(); logical != nil && !logical.IsNone() {
		_, isInt := logical.(schema.IntLogicalType) // not a time or a decimal
		number = number && isInt
	}
	if m.id.kind != parquet.Types.ByteArray && !number {
		return wrongID(paths, fmt.Sprintf("%v (%v)", m.id.kind, id.LogicalType()))
	}
	return nil
}

// noText is the error of a file without the text column. texts are the columns that may be the
// text.
func noText(paths [2][]string, texts []string) error {
	return advise("the file has no column %q; %s", joinPath(paths[textField]), otherTexts(paths, texts))
}

// wrongText is the error of a text column that does not hold strings.
func wrongText(paths [2][]string, kind string, texts []string) error {
	return advise("the column %q of the texts has the type %s, not string; %s", joinPath(paths[textField]), kind,
		otherTexts(paths, texts))
}

// noID is the error of a file without the id column that the caller has named.
func noID(paths [2][]string, texts []string) error {
	has := "no column has text"
	if len(texts) > 0 {
		has = "the text columns are " + strings.Join(texts, ", ")
	}
	return advise("the file has no column %q for the ids; %s; remove --id-field if the documents have no ids",
		joinPath(paths[idField]), has)
}

// wrongID is the error of an id column that holds neither strings nor integers.
func wrongID(paths [2][]string, kind string) error {
	return advise("the column %q of the ids has the type %s, neither string nor integer; select another column with "+
		"--id-field", joinPath(paths[idField]), kind)
}

// otherTexts lists the columns that may be the text, without the id column.
func otherTexts(paths [2][]string, texts []string) string {
	id := joinPath(paths[idField])
	texts = slices.DeleteFunc(slices.Clone(texts), func(name string) bool { return name == id })
	switch len(texts) {
	case 0:
		return "no other column has text"
	case 1:
		return "to read the only text column, pass --text-field " + texts[0]
	}
	return "the text columns are " + strings.Join(texts, ", ") + "; select one with --text-field"
}

// groupAt returns the type of the node at a path if it contains columns instead of being one: list,
// map or struct; otherwise "".
func (m *parquetMeta) groupAt(path []string) string {
	node := schema.Node(m.file.Schema.Root())
	for _, name := range path {
		group, ok := node.(*schema.GroupNode)
		if !ok || group.FieldIndexByName(name) < 0 {
			return ""
		}
		node = group.Field(group.FieldIndexByName(name))
	}
	if _, ok := node.(*schema.GroupNode); !ok {
		return ""
	}
	switch node.LogicalType().(type) {
	case schema.MapLogicalType:
		return "map"
	case schema.ListLogicalType:
		return "list"
	}
	if node.RepetitionType() == parquet.Repetitions.Repeated {
		return "list"
	}
	return "struct"
}

func newParquetColumn(c *schema.Column, leaf int) *parquetColumn {
	p := &parquetColumn{name: joinPath(c.ColumnPath()), leaf: leaf, kind: c.PhysicalType(),
		levels: c.MaxDefinitionLevel()}
	if t, ok := c.LogicalType().(schema.IntLogicalType); ok {
		p.unsigned = !t.IsSigned()
	}
	return p
}

// joinPath is the inverse of splitPath.
func joinPath(path []string) string {
	escaped := make([]string, len(path))
	for i, name := range path {
		escaped[i] = strings.NewReplacer(`\`, `\\`, `.`, `\.`).Replace(name)
	}
	return strings.Join(escaped, ".")
}

// findGroups reads the positions of the row groups.
func (m *parquetMeta) findGroups() error {
	m.groups = make([]parquetGroup, 0, len(m.file.RowGroups))
	var first int64
	for n, group := range m.file.RowGroups {
		g := parquetGroup{first: first, rows: group.GetNumRows(), start: math.MaxInt64}
		if g.rows < 0 || first+g.rows < first {
			return fmt.Errorf("the metadata says that row group %d has %d rows", n, g.rows)
		}
		if len(group.Columns) != m.file.Schema.NumColumns() {
			return fmt.Errorf("the metadata says that row group %d has %d columns instead of %d", n, len(group.Columns),
				m.file.Schema.NumColumns())
		}
		for leaf, chunk := range group.Columns {
			c := chunk.MetaData
			if c == nil {
				return advise("row group %d has encrypted columns, which are not supported; decrypt the file first",
					n)
			}
			start := c.DataPageOffset
			if dictionary := c.GetDictionaryPageOffset(); dictionary > 0 && dictionary < start {
				// some writers put 0 if there is none
				start = dictionary
			}
			g.start = min(g.start, start)
			for _, column := range []*parquetColumn{m.text, m.id} {
				if column == nil || column.leaf != leaf || g.rows == 0 {
					continue
				}
				if parquet.Type(c.Type) != column.kind || c.NumValues != g.rows || start < 4 || start > m.end ||
					c.TotalCompressedSize < 0 || c.TotalCompressedSize > m.end-start || c.TotalUncompressedSize < 0 {
					return fmt.Errorf("the metadata of row group %d contradicts itself or the file's size", n)
				}
			}
		}
		first += g.rows
		m.groups = append(m.groups, g)
	}
	return nil
}

// cuttable reports whether the row groups are in order in the file, so that each piece is a
// contiguous byte range.
func (m *parquetMeta) cuttable() bool {
	for i, g := range m.groups {
		if g.start > m.end || i > 0 && g.start <= m.groups[i-1].start {
			return false
		}
	}
	return true
}

// bound returns the first byte of a row group. For the first group, it returns the start of the
// file, and after the last group, the end of the file.
func (m *parquetMeta) bound(group int64, size int64) int64 {
	switch {
	case group <= 0:
		return 0
	case group >= int64(len(m.groups)):
		return size
	}
	return m.groups[group].start
}

// parquetReader reads the documents of row groups.
type parquetReader struct {
	r        *Reader
	source   *source
	meta     *parquetMeta
	size     int64
	group    int64         // the current group
	end      int64         // the group after the last one
	base     int64         // byte of the file at which the piece starts
	row      int64         // of the file, the next one
	left     int64         // rows of the group
	firstRow int64         // of the piece
	started  bool          // the columns of the group are open
	text, id *columnReader // id is nil if there is no id column
}

func newParquetReader(r *Reader, s *source) (rowReader, error) {
	meta, err := readParquetMeta(s, s.size, r.o, r.scanner.paths)
	if err != nil {
		return nil, r.broken(0, 0, inMetadata("Parquet", err))
	}
	p := &parquetReader{r: r, source: s, meta: meta, size: s.size, group: r.piece.Start, end: r.piece.End}
	if p.end < 0 {
		p.end = int64(len(meta.groups))
	}
	if p.group < 0 || p.group > p.end || p.end > int64(len(meta.groups)) {
		return nil, fmt.Errorf("reading %s: expected row groups %[3]d to %[4]d, but the file has %[2]d; the file "+
			"changed after it was split; start again",
			r.piece.File, len(meta.groups), p.group, p.end)
	}
	p.base = meta.bound(p.group, p.size)
	r.hashRange(s, p.base, meta.bound(p.end, p.size))
	p.text = &columnReader{p: p, column: meta.text}
	if meta.id != nil {
		p.id = &columnReader{p: p, column: meta.id}
	}
	if p.group < p.end {
		p.firstRow = meta.groups[p.group].first
	}
	p.row = p.firstRow
	p.group--
	return p, nil
}

// advance moves to the next row group that has rows. It returns false after the last.
func (p *parquetReader) advance() bool {
	for p.left == 0 {
		p.group++
		p.r.read.Store(p.meta.bound(p.group, p.size) - p.base)
		if p.group >= p.end {
			return false
		}
		g := &p.meta.groups[p.group]
		p.row, p.left = g.first, g.rows
		p.started = false
	}
	return true
}

// start opens the columns of the row group.
func (p *parquetReader) start() error {
	if p.started {
		return nil
	}
	p.started = true
	if err := p.text.start(int(p.group)); err != nil || p.id == nil {
		return err
	}
	return p.id.start(int(p.group))
}

func (p *parquetReader) next() (Document, error) {
	r := p.r
	if !p.advance() {
		return Document{}, r.finish()
	}
	r.start, r.number = p.row, p.row-p.firstRow+1
	text, id, err := p.read()
	if err != nil {
		return Document{}, err
	}
	return r.rowDocument(text, id)
}

// read reads the next row.
func (p *parquetReader) read() (text, id []byte, err error) {
	if err = p.start(); err == nil {
		text, err = p.text.next()
	}
	if err == nil && p.id != nil {
		id, err = p.id.next()
	}
	if err != nil {
		return nil, nil, p.r.broken(p.row-p.firstRow+1, p.row, fmt.Errorf("row %d (row group %d): %w", p.row, p.group,
			err))
	}
	p.row++
	p.left--
	p.r.lines = p.row - p.firstRow
	return text, id, nil
}

func (p *parquetReader) skip(row int64) error {
	for {
		if !p.advance() {
			return nil
		}
		if p.row+p.left <= row+1 { // the whole group
			p.left = 0
			continue
		}
		if p.row > row {
			return nil
		}
		if err := p.r.ctx.Err(); err != nil {
			return p.r.stopped(err)
		}
		if _, _, err := p.read(); err != nil {
			return err
		}
	}
}
