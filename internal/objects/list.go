package objects

import (
	"context"
	"fmt"
	"iter"
	"path"
	"slices"
	"strings"
)

// List returns the objects whose URLs start with a prefix, in the bytewise order of their keys. The
// prefix is a text, not a folder: end it with a slash for the objects in a folder. An error ends
// the sequence.
func List(ctx context.Context, prefix string) iter.Seq2[Entry, error] {
	return list(ctx, prefix, false)
}

// ListFolder is [List] for the objects in a folder, without those in folders below it.
func ListFolder(ctx context.Context, folder string) iter.Seq2[Entry, error] {
	return list(ctx, strings.TrimSuffix(folder, "/")+"/", true)
}

func list(ctx context.Context, prefix string, flat bool) iter.Seq2[Entry, error] {
	return func(yield func(Entry, error) bool) {
		l, err := locate(ctx, prefix)
		if err != nil {
			yield(Entry{}, err)
			return
		}
		last, token := "", ""
		for {
			var entries []Entry
			var next string
			err := retry(ctx, l, func(ctx context.Context) error {
				return limited(ctx, 0, func(ctx context.Context) (err error) {
					entries, next, err = l.list(ctx, l.key, flat, token)
					return err
				})
			})
			if err != nil {
				yield(Entry{}, err)
				return
			}
			for _, e := range entries { // whose URLs are keys
				if e.URL <= last && last != "" {
					yield(Entry{}, fmt.Errorf("%s: the store's list is not in order: %q after %q", l.name(), e.URL,
						last))
					return
				}
				last = e.URL
				e.URL = l.base + e.URL
				if !yield(e, nil) {
					return
				}
			}
			if token = next; token == "" {
				return
			}
		}
	}
}

// Glob returns the objects whose keys match a pattern, in the bytewise order of their keys. In the
// key, * ? and [a-z] match characters except slashes, as in [path.Match].
func Glob(ctx context.Context, pattern string) ([]Entry, error) {
	l, err := locate(ctx, pattern)
	if err != nil {
		return nil, err
	}
	if _, err := path.Match(l.key, ""); err != nil {
		return nil, fmt.Errorf("%s: malformed pattern", l.name())
	}
	prefix := l.key
	if i := strings.IndexAny(prefix, `*?[\`); i >= 0 {
		prefix = prefix[:i]
	}
	flat := !strings.Contains(l.key[len(prefix):], "/")
	var found []Entry
	for e, err := range list(ctx, l.base+prefix, flat) {
		if err != nil {
			return nil, err
		}
		if ok, _ := path.Match(l.key, e.URL[len(l.base):]); ok {
			found = append(found, e)
		}
	}
	return slices.Clip(found), nil
}
