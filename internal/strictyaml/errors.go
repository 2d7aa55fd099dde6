package strictyaml

import (
	"errors"
	"fmt"
	"slices"
	"strings"
)

// An Error is a problem in a file.
type Error struct {
	Line int    // from 1; 0 for a value that is missing in the file
	Path string // of the value, such as "$.sources[0].weight"

	file     string
	decoding bool // the value could not be read
	err      error
}

func (e *Error) Error() string {
	if e.Line == 0 {
		return fmt.Sprintf("%s: %s", e.file, e.err)
	}
	return fmt.Sprintf("%s:%d: %s", e.file, e.Line, e.err)
}

func (e *Error) Unwrap() error { return e.err }

// Errors are the problems of a file, sorted by line. Error prints each on its own line.
type Errors []error

func (e Errors) Error() string {
	texts := make([]string, len(e))
	for i, err := range e {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "\n")
}

// Unwrap returns the problems.
func (e Errors) Unwrap() []error { return e }

// All joins the problems of a file into one error, or returns nil if there are none. If a value
// could not be read, All drops other problems with that value, with its parts, and with the values
// that contain it, because they follow from the first problem.
func All(problems ...[]error) error {
	var all []error
	for _, list := range problems {
		for _, err := range list {
			var several Errors
			if errors.As(err, &several) {
				all = append(all, several...)
			} else if err != nil {
				all = append(all, err)
			}
		}
	}
	var unread []string
	for _, err := range all {
		if e, ok := err.(*Error); ok && e.decoding {
			unread = append(unread, e.Path)
		}
	}
	all = slices.DeleteFunc(all, func(err error) bool {
		e, ok := err.(*Error)
		return ok && !e.decoding && slices.ContainsFunc(unread, func(path string) bool {
			return within(path, e.Path) ||
				within(e.Path, path)
		})
	})
	line := func(err error) int {
		if e, ok := err.(*Error); ok && e.Line > 0 {
			return e.Line
		}
		return 1 << 30 // missing values are last
	}
	slices.SortStableFunc(all, func(a, b error) int { return line(a) - line(b) })
	switch len(all) {
	case 0:
		return nil
	case 1:
		return all[0]
	}
	return Errors(all)
}

// within reports whether path is the path of value or of a part of it.
func within(path, value string) bool {
	rest, ok := strings.CutPrefix(path, value)
	return ok && (rest == "" || rest[0] == '.' || rest[0] == '[')
}

// Unread reports whether err, an error of [File.Decode], concerns the value at path or a part of
// it.
func Unread(err error, path string) bool {
	list := []error{err}
	var several Errors
	if errors.As(err, &several) {
		list = several
	}
	return slices.ContainsFunc(list, func(err error) bool {
		var e *Error
		return errors.As(err, &e) && e.decoding && within(e.Path, path)
	})
}
