package main

import (
	"bytes"
	"cmp"
	_ "embed"
	"errors"
	"fmt"
	"html/template"
	"io/fs"
	"net/url"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"unicode"

	"github.com/yuin/goldmark"
	"github.com/yuin/goldmark/ast"
	"github.com/yuin/goldmark/extension"
	"github.com/yuin/goldmark/renderer/html"
	"github.com/yuin/goldmark/text"
)

//go:embed style.css
var styleCSS []byte

//go:embed page.html
var pageHTML string

var pageTemplate = template.Must(template.New("page").Parse(pageHTML))

// A page is one Markdown file.
type page struct {
	path    string // in the repository, with slashes
	source  []byte
	tree    ast.Node
	title   string
	anchors map[string]bool
}

// A site is all pages of a repository.
type site struct {
	root     string
	markdown goldmark.Markdown
	pages    map[string]*page
	copies   map[string]bool // other files that pages link to
}

// load reads and parses all pages below root.
func load(root string) (*site, error) {
	s := &site{root: root, pages: make(map[string]*page), copies: make(map[string]bool),
		// Raw HTML is refused by check, except comments.
		markdown: goldmark.New(goldmark.WithExtensions(extension.GFM), goldmark.WithRendererOptions(html.WithUnsafe()))}
	err := filepath.WalkDir(root, func(name string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		base := entry.Name()
		if entry.IsDir() {
			if name != root && (base == "testdata" || strings.HasPrefix(base, ".") || isOutput(root, name)) {
				return fs.SkipDir
			}
			return nil
		}
		if path.Ext(base) != ".md" {
			return nil
		}
		rel, err := filepath.Rel(root, name)
		if err != nil {
			return err
		}
		source, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		return s.add(filepath.ToSlash(rel), source)
	})
	if err == nil && s.pages["README.md"] == nil {
		err = fmt.Errorf("%s: no README.md; pass the root of the repository as --root", root)
	}
	return s, err
}

// isOutput reports whether a folder has files that make writes: .gitignore lists them all.
func isOutput(root, name string) bool {
	return filepath.Dir(name) == filepath.Clean(root) &&
		slices.Contains([]string{"bin", "dist", "man", "quickstart", "site"}, filepath.Base(name))
}

// add parses a page and gives its headings the anchors that GitHub gives them.
func (s *site) add(name string, source []byte) error {
	p := &page{path: name, source: source, anchors: make(map[string]bool)}
	p.tree = s.markdown.Parser().Parse(text.NewReader(source))
	err := ast.Walk(p.tree, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		h, ok := n.(*ast.Heading)
		if !ok || !entering {
			return ast.WalkContinue, nil
		}
		title := plain(h, source)
		if h.Level == 1 && p.title == "" {
			p.title = title
		}
		anchor := slug(title)
		for i := 1; p.anchors[anchor]; i++ {
			anchor = fmt.Sprintf("%s-%d", slug(title), i)
		}
		p.anchors[anchor] = true
		h.SetAttributeString("id", []byte(anchor))
		return ast.WalkSkipChildren, nil
	})
	if err == nil && p.title == "" {
		err = fmt.Errorf("%s:1: no title; add a line that starts with #", name)
	}
	s.pages[name] = p
	return err
}

// plain returns the text of a node without markup.
func plain(n ast.Node, source []byte) string {
	var b strings.Builder
	_ = ast.Walk(n, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if t, ok := n.(*ast.Text); ok && entering {
			b.Write(t.Segment.Value(source))
		}
		return ast.WalkContinue, nil
	})
	return b.String()
}

// slug is GitHub's rule for the anchor of a heading: lower case, punctuation removed, spaces as
// hyphens.
func slug(title string) string {
	return strings.Map(func(r rune) rune {
		switch {
		case r == ' ':
			return '-'
		case unicode.IsLetter(r), unicode.IsDigit(r), r == '-', r == '_':
			return unicode.ToLower(r)
		}
		return -1
	}, title)
}

// lineOf returns the number of the line on which a node begins.
func (p *page) lineOf(n ast.Node) int {
	at := -1
	_ = ast.Walk(n, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if t, ok := n.(*ast.Text); ok && at < 0 {
			at = t.Segment.Start
		}
		return ast.WalkContinue, nil
	})
	for ; at < 0 && n != nil; n = n.Parent() {
		if n.Type() == ast.TypeBlock && n.Lines().Len() > 0 {
			at = n.Lines().At(0).Start
		}
	}
	return 1 + bytes.Count(p.source[:max(at, 0)], []byte("\n"))
}

// render checks all links and returns the files of the site by name.
func (s *site) render() (map[string][]byte, error) {
	var problems []error
	names := make([]string, 0, len(s.pages))
	for name := range s.pages {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		problems = append(problems, s.links(s.pages[name])...)
	}
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}
	files := map[string][]byte{"style.css": styleCSS}
	for _, name := range names {
		data, err := s.html(s.pages[name])
		if err != nil {
			return nil, fmt.Errorf("%s: %w", name, err)
		}
		files[htmlName(name)] = data
	}
	for name := range s.copies {
		data, err := os.ReadFile(filepath.Join(s.root, filepath.FromSlash(name)))
		if err != nil {
			return nil, err
		}
		files[copyName(name)] = data
	}
	return files, nil
}

// links checks the links and images of a page, and replaces the names of pages by the names of
// their HTML files.
func (s *site) links(p *page) []error {
	var problems []error
	report := func(n ast.Node, format string, args ...any) {
		problems = append(problems, fmt.Errorf("%s:%d: %s", p.path, p.lineOf(n), fmt.Sprintf(format, args...)))
	}
	_ = ast.Walk(p.tree, func(n ast.Node, entering bool) (ast.WalkStatus, error) {
		if !entering {
			return ast.WalkContinue, nil
		}
		var err error
		switch n := n.(type) {
		case *ast.Link:
			n.Destination, err = s.resolve(p, n.Destination, false)
		case *ast.Image:
			n.Destination, err = s.resolve(p, n.Destination, true)
		case *ast.AutoLink:
			if n.AutoLinkType == ast.AutoLinkURL {
				_, err = s.resolve(p, n.URL(p.source), false)
			}
		case *ast.Paragraph:
			if bytes.HasPrefix(n.Lines().Value(p.source), []byte("|")) {
				err = errors.New("a row outside of a table; remove the blank line before it, or add a header")
			}
		case *ast.RawHTML:
			if raw := n.Segments.Value(p.source); !bytes.HasPrefix(raw, []byte("<!--")) {
				err = fmt.Errorf("raw HTML %q; write Markdown", raw)
			}
		case *ast.HTMLBlock:
			if n.HTMLBlockType != ast.HTMLBlockType2 { // a comment
				err = errors.New("raw HTML; write Markdown")
			}
		}
		if err != nil {
			report(n, "%v", err)
		}
		return ast.WalkContinue, nil
	})
	return problems
}

// resolve checks the target of a link or image, and returns the target in the site.
func (s *site) resolve(p *page, target []byte, image bool) ([]byte, error) {
	u, err := url.Parse(string(target))
	if err != nil {
		return nil, fmt.Errorf("link %s: not a URL; correct it", target)
	}
	if u.Scheme != "" || u.Host != "" {
		switch {
		case image:
			return nil, fmt.Errorf("image %s: loaded from another host; add a copy to docs/images", target)
		case u.Scheme == "mailto" && u.Opaque != "", (u.Scheme == "https" || u.Scheme == "http") && u.Host != "":
			return target, nil
		}
		return nil, fmt.Errorf("link %s: unknown form of URL; use https, http or mailto", target)
	}
	name := p.path
	if u.Path != "" {
		name = path.Join(path.Dir(p.path), u.Path)
	}
	if name == ".." || strings.HasPrefix(name, "../") || strings.HasPrefix(u.Path, "/") {
		return nil, fmt.Errorf("link %s: outside the repository; use a relative path in it", target)
	}
	to, isPage := s.pages[name]
	if !isPage {
		info, err := os.Stat(filepath.Join(s.root, filepath.FromSlash(name)))
		switch {
		case err != nil:
			return nil, fmt.Errorf("link %s: %s does not exist; correct the path", target, name)
		case info.IsDir():
			return nil, fmt.Errorf("link %s: %s is a folder; link to a file in it", target, name)
		case u.Fragment != "":
			return nil, fmt.Errorf("link %s: %s is not a page and has no anchors; remove #%s", target, name, u.Fragment)
		}
		s.copies[name] = true
		return []byte(relative(p.path, copyName(name))), nil
	}
	if u.Fragment != "" && !to.anchors[u.Fragment] {
		return nil, fmt.Errorf("link %s: %s has no heading with the anchor #%s; %s", target, name, u.Fragment,
			nearest(u.Fragment, to.anchors))
	}
	if u.Path == "" {
		return target, nil
	}
	out := relative(p.path, htmlName(name))
	if u.Fragment != "" {
		out += "#" + u.Fragment
	}
	return []byte(out), nil
}

// nearest names the anchors that share a word with the one that is missing.
func nearest(missing string, anchors map[string]bool) string {
	var like []string
	for a := range anchors {
		for _, word := range strings.Split(missing, "-") {
			if len(word) > 3 && strings.Contains(a, word) {
				like = append(like, "#"+a)
				break
			}
		}
	}
	slices.Sort(like)
	if len(like) == 0 {
		return "correct it"
	}
	return "similar: " + strings.Join(like, ", ")
}

// htmlName is the file of a page in the site.
func htmlName(name string) string {
	dir, base := path.Split(name)
	if base == "README.md" {
		return dir + "index.html"
	}
	return strings.TrimSuffix(name, ".md") + ".html"
}

// copyName is the file of the site that has a copy of another file. A copy of source code is a text:
// go build must not find a package in the site.
func copyName(name string) string {
	if slices.Contains([]string{".svg", ".png"}, path.Ext(name)) {
		return name
	}
	return name + ".txt"
}

// relative is the way from one file of the repository to another.
func relative(from, to string) string {
	out, err := filepath.Rel(filepath.FromSlash(path.Dir(from)), filepath.FromSlash(to))
	if err != nil {
		panic(err) // both are relative to the root
	}
	return filepath.ToSlash(out)
}

type item struct {
	Title, Href string
	Current     bool
	path        string
}

type group struct {
	Name  string
	Open  bool
	Items []item
}

// groupOf returns the number and the name of the group of the navigation that has a page.
func groupOf(name string) (int, string) {
	switch {
	case strings.HasPrefix(name, "docs/guides/"):
		return 1, "Guides"
	case strings.HasPrefix(name, "docs/reference/"), name == "docs/glossary.md":
		return 2, "Reference"
	case strings.HasPrefix(name, "docs/formats/"):
		return 3, "Formats"
	case strings.HasPrefix(name, "docs/decisions/"):
		return 5, "Decisions"
	case name == "README.md":
		return 0, "Start"
	}
	return 4, "Project"
}

// navigation returns the groups of links as the page sees them.
func (s *site) navigation(of *page) []group {
	groups := make([]group, 6)
	for name, p := range s.pages {
		i, title := groupOf(name)
		groups[i].Name = title
		groups[i].Items = append(groups[i].Items, item{p.title, relative(of.path, htmlName(name)), p == of, name})
	}
	own, _ := groupOf(of.path)
	groups = slices.DeleteFunc(groups, func(g group) bool { return len(g.Items) == 0 })
	for i := range groups {
		g := &groups[i]
		n, _ := groupOf(g.Items[0].path)
		g.Open = n == own || n < 4
		// Decisions are in the order of their numbers, other pages in the order of their titles.
		slices.SortFunc(g.Items, func(a, b item) int {
			if g.Name == "Decisions" {
				return cmp.Compare(strings.ReplaceAll(a.path, "README", ""), strings.ReplaceAll(b.path, "README", ""))
			}
			return cmp.Compare(strings.ToLower(a.Title), strings.ToLower(b.Title))
		})
	}
	return groups
}

func (s *site) html(p *page) ([]byte, error) {
	var body, out bytes.Buffer
	if err := s.markdown.Renderer().Render(&body, p.source, p.tree); err != nil {
		return nil, err
	}
	title := p.title
	if title != "mula" {
		title += " · mula"
	}
	err := pageTemplate.Execute(&out, struct {
		Title, Root string
		Groups      []group
		Body        template.HTML
	}{title, strings.Repeat("../", strings.Count(p.path, "/")), s.navigation(p), template.HTML(body.String())})
	return out.Bytes(), err
}
