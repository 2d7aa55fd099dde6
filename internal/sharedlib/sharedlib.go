// Package sharedlib opens shared libraries of C at run time, so that mula is built and started
// without them. Which libraries these are, what is needed of them, and what a user is told who
// lacks them, say the packages that call them.
package sharedlib

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
)

// A Search says where a library is looked for.
type Search struct {
	Variable string   // environment variable that names the library's file; where it is set, nothing else is tried
	Names    []string // names that the system's loader looks up, in the order in which they are tried
	Global   bool     // the library's symbols are seen by what it loads itself; otherwise by nobody but the [Library]
}

// Candidates are the names that [Search.Open] tries.
func (s Search) Candidates() []string {
	if named := os.Getenv(s.Variable); named != "" {
		return []string{named}
	}
	return s.Names
}

// Open opens the first candidate that can be opened. The error has the system's reason for each.
func (s Search) Open() (*Library, error) {
	var reasons failure
	for _, name := range s.Candidates() {
		handle, err := open(name, s.Global)
		if err == nil {
			return &Library{name, handle}, nil
		}
		if missing(name, err.Error()) {
			err = missingError{err}
		}
		reasons = append(reasons, err)
	}
	return nil, reasons
}

// ErrMissing is in the error of [Search.Open] if no candidate exists. Without it, a library exists
// and cannot be loaded.
var ErrMissing = errors.New("the library is not installed")

// A failure is why no candidate could be opened.
type failure []error

func (f failure) Error() string {
	texts := make([]string, len(f))
	for i, err := range f {
		texts[i] = err.Error()
	}
	return strings.Join(texts, "; ")
}

func (f failure) Unwrap() []error {
	out := make([]error, len(f))
	for i, err := range f {
		if out[i] = err; errors.Is(err, ErrMissing) {
			out[i] = errors.Unwrap(err) // one missing candidate of several is not ErrMissing
		}
	}
	return out
}

// A missingError is the system's reason for a candidate that does not exist.
type missingError struct{ error }

func (e missingError) Unwrap() error { return e.error }

func (missingError) Is(target error) bool { return target == ErrMissing }

func (f failure) Is(target error) bool {
	return target == ErrMissing && !slices.ContainsFunc(f, func(err error) bool { return !errors.Is(err, ErrMissing) })
}

// missing reports whether a reason says that the candidate does not exist. A reason that names
// another file is about a library that the candidate needs.
func missing(candidate, reason string) bool {
	return strings.Contains(reason, candidate) && strings.Contains(strings.ToLower(reason), "no such file")
}

// A Library is open, and stays so as long as the process lives: libraries have threads of their
// own.
type Library struct {
	Name   string // the candidate that was opened
	handle uintptr
}

// Loaded stands for all libraries that the process has loaded by now, the one of C among them.
var Loaded = &Library{"the process", everything}

// Symbol is the address of a function or variable. The error names the library and the symbol.
func (l *Library) Symbol(name string) (uintptr, error) {
	address, err := symbol(l.handle, name)
	if err == nil && address == 0 {
		err = fmt.Errorf("%s has no %s", l.Name, name)
	}
	return address, err
}
