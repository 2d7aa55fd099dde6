package strictyaml

import (
	"errors"
	"fmt"
	"strings"
)

// A FieldError is an error in the value of a field, by its full name.
type FieldError struct {
	Field   string // full name, such as "optimizer.clip"
	Message string // follows the name
	Cause   error  // may be nil
}

func (e *FieldError) Error() string { return e.Field + e.Message }

func (e *FieldError) Unwrap() error { return e.Cause }

// FieldErrors are the errors in several fields.
type FieldErrors []*FieldError

func (e FieldErrors) Error() string {
	texts := make([]string, len(e))
	for i, field := range e {
		texts[i] = field.Error()
	}
	return strings.Join(texts, "\n")
}

// Invalid returns an error about a field.
func Invalid(field, format string, args ...any) error {
	return &FieldError{Field: field, Message: " " + fmt.Sprintf(format, args...)}
}

// Locate adds file and line to an error about fields, if there is a file. It returns other errors
// unchanged.
func (f *File) Locate(err error) error {
	if f == nil {
		return err
	}
	var several FieldErrors
	var field *FieldError
	switch {
	case errors.As(err, &several):
		located := make([]error, len(several))
		for i, e := range several {
			located[i] = f.Errorf("$."+e.Field, "%w", e)
		}
		return All(located)
	case errors.As(err, &field):
		return f.Errorf("$."+field.Field, "%w", err)
	}
	return err
}
