// Package sharedlib opens C shared libraries at run time, so that mula builds and starts without
// them. The calling packages choose the libraries and explain to the user what to install.
package sharedlib

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
)

// A Search describes where to look for a library.
type Search struct {
	Variable string   // environment variable with the path of the library; if it is set, nothing else is tried
	Names    []string // names for the dynamic loader, in the order in which they are tried
	Global   bool     // use RTLD_GLOBAL: libraries that are loaded later see its symbols
}

// Candidates returns the names that [Search.Open] tries.
func (s Search) Candidates() []string {
	if named := os.Getenv(s.Variable); named != "" {
		return []string{named}
	}
	return s.Names
}

// Open opens the first candidate that can be opened. The error has the loader's reason for each
// candidate.
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

// ErrMissing matches the error of [Search.Open] if no candidate exists. If the error does not
// match, a library exists but cannot be loaded.
var ErrMissing = errors.New("the library is not installed")

// A failure lists the reasons why no candidate could be opened.
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

// A missingError is the loader's reason for a candidate that does not exist.
type missingError struct{ error }

func (e missingError) Unwrap() error { return e.error }

func (missingError) Is(target error) bool { return target == ErrMissing }

func (f failure) Is(target error) bool {
	return target == ErrMissing && !slices.ContainsFunc(f, func(err error) bool { return !errors.Is(err, ErrMissing) })
}

// missing reports whether a reason means that the candidate does not exist. If the reason names
// another file, a library that the candidate needs is missing.
func missing(candidate, reason string) bool {
	return strings.Contains(reason, candidate) && strings.Contains(strings.ToLower(reason), "no such file")
}

// A Library is an open library. It stays open until the process ends, because libraries have
// threads of their own.
type Library struct {
	Name   string // the candidate that was opened
	handle uintptr
}

// Loaded has the symbols of all libraries that the process has loaded, including the C library.
var Loaded = &Library{"the process", everything}

// Symbol returns the address of a function or variable. The error names the library and the symbol.
func (l *Library) Symbol(name string) (uintptr, error) {
	address, err := symbol(l.handle, name)
	if err == nil && address == 0 {
		err = fmt.Errorf("%s has no symbol %s", l.Name, name)
	}
	return address, err
}
