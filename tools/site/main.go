// Command site builds the documentation as a static site, and checks every link in it.
//
//	go -C tools run ./site                  # writes site/ at the root of the repository
//	go -C tools run ./site --check          # only checks links, anchors and images
//
// A page is a Markdown file of the repository. A link to a page, an anchor or an image that does
// not exist is an error with file and line. External links are checked for form only. The site
// makes no external requests.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

// marker is the file that shows that a folder was written by this program.
const marker = ".mula-site"

func main() {
	root := flag.String("root", "..", "read the pages of the repository at `FOLDER`")
	output := flag.String("output", "", "write the site to `FOLDER` (default: site in the repository)")
	check := flag.Bool("check", false, "check links, anchors and images, and write nothing")
	flag.Parse()
	if *output == "" {
		*output = filepath.Join(*root, "site")
	}
	if err := run(*root, *output, *check); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(root, output string, check bool) error {
	s, err := load(root)
	if err != nil {
		return err
	}
	files, err := s.render()
	if err != nil {
		return err
	}
	if check {
		return nil
	}
	if err := clear(output); err != nil {
		return err
	}
	for name, data := range files {
		name = filepath.Join(output, filepath.FromSlash(name))
		if err := os.MkdirAll(filepath.Dir(name), 0o777); err != nil {
			return err
		}
		if err := os.WriteFile(name, data, 0o666); err != nil {
			return err
		}
	}
	fmt.Printf("%s: %d pages, %d files\n", filepath.Join(output, "index.html"), len(s.pages), len(files))
	return nil
}

// clear removes an earlier site. Another folder is refused.
func clear(folder string) error {
	entries, err := os.ReadDir(folder)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	if len(entries) > 0 {
		if _, err := os.Stat(filepath.Join(folder, marker)); err != nil {
			return fmt.Errorf("%s: not an earlier site; choose another --output", folder)
		}
	}
	if err := os.RemoveAll(folder); err != nil {
		return err
	}
	if err := os.MkdirAll(folder, 0o777); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(folder, marker), nil, 0o666)
}
