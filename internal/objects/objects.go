// Package objects reads and writes files in object stores, by URL:
//
//	s3://BUCKET/KEY            Amazon S3 and servers with its interface
//	gs://BUCKET/KEY            Google Cloud Storage
//	az://CONTAINER/KEY         Azure Blob Storage
//	https://HOST/PATH          any web server, read only; also http
//	hf://datasets/OWNER/NAME/PATH and hf://datasets/OWNER/NAME@REVISION/PATH
//	                           data sets of the Hugging Face hub, read only
//
// Credentials and endpoints come from each vendor's standard settings. Neither errors nor URLs in
// errors contain credentials.
//
// A failed request is repeated, see [WithPatience]. An object that was replaced while it is read is
// an error that wraps [ErrChanged]. An object is written completely or not at all.
package objects

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"
)

// ErrChanged means that an object was replaced while it was in use.
var ErrChanged = errors.New("the object changed while it was in use")

// Info describes an object.
type Info struct {
	Size     int64     // in bytes; -1 if a web server does not send it
	Version  string    // ETag or generation: a new value for new content; "" if unknown
	Modified time.Time // zero if unknown
}

// An Entry is an object of a listing.
type Entry struct {
	URL string
	Info
}

// Counters has the requests of this process since its start.
type Counters struct {
	Requests     int64 // including repeated ones
	Retries      int64
	BytesRead    int64 // of objects' content
	BytesWritten int64
}

var counters struct{ requests, retries, read, written atomic.Int64 }

// Count returns the current counters.
func Count() Counters {
	return Counters{counters.requests.Load(), counters.retries.Load(), counters.read.Load(), counters.written.Load()}
}

// A store is one bucket, container, host or data set. Its methods send one request each, except
// where a store needs more. They return a *failure for a status that is not a success.
type store interface {
	stat(ctx context.Context, key string) (Info, error)
	// get reads n bytes from off, or all bytes from off if n is -1. A store may refuse another
	// version than the wanted version. Callers compare both.
	get(ctx context.Context, key string, off, n int64, version string) (*http.Response, error)
	// info returns the facts about the object in a response of get.
	info(r *http.Response) Info
	// list returns a page of the keys with a prefix, in bytewise order, and the token of the next
	// page. With flat, keys with a slash after the prefix are omitted. The URLs are the keys.
	list(ctx context.Context, prefix string, flat bool, token string) (entries []Entry, next string, err error)
	// put writes an object and returns its version. The error wraps ErrChanged if the condition
	// does not hold.
	put(ctx context.Context, key string, data []byte, c condition) (version string, err error)
	// upload starts an object of several parts.
	upload(ctx context.Context, key string) (upload, error)
	remove(ctx context.Context, key string) error
}

// An upload writes an object of several parts, which appears at the end.
type upload interface {
	// parallel returns how many calls of part may run at a time.
	parallel() int
	// part sends a part, counted from 0, that starts at byte off. It may be repeated.
	part(ctx context.Context, n int, off int64, data []byte) error
	// finish makes the object appear. It may be repeated.
	finish(ctx context.Context, parts int, size int64) error
	abort(ctx context.Context) error
}

// A condition of a write.
type condition struct {
	absent  bool   // the object must not exist
	version string // the object must have this version, unless it is ""
}

// A location is an object in its store.
type location struct {
	store
	key  string
	base string // the URL of the key ""
}

// name returns the URL for messages, without credentials.
func (l location) name() string { return Clean(l.base + l.key) }

// Clean removes credentials from the URL of a web server: the user's name and password, and the
// query, which may be a signature. It returns other paths unchanged.
func Clean(address string) string {
	if !strings.HasPrefix(address, "http://") && !strings.HasPrefix(address, "https://") {
		return address
	}
	u, err := url.Parse(address)
	if err != nil {
		before, _, _ := strings.Cut(address, "?")
		if scheme, rest, ok := strings.Cut(before, "://"); ok {
			return scheme + "://" + rest[strings.LastIndex(rest, "@")+1:]
		}
		return before
	}
	u.User, u.RawQuery, u.Fragment = nil, "", ""
	return u.String()
}

// schemes has the function that finds the store for the rest of a URL, after "scheme://".
var schemes = map[string]func(ctx context.Context, scheme, rest string) (location, error){
	"s3":    locateS3,
	"gs":    locateGCS,
	"az":    locateAzure,
	"hf":    locateHub,
	"http":  locateWeb,
	"https": locateWeb,
}

// schemeNames lists the schemes for messages.
const schemeNames = "s3, gs, az, hf, http and https"

// IsURL reports whether a path is a URL of any scheme, known or not.
func IsURL(path string) bool {
	scheme, _, ok := strings.Cut(path, "://")
	if !ok || scheme == "" {
		return false
	}
	for i, c := range []byte(scheme) {
		letter := c|0x20 >= 'a' && c|0x20 <= 'z'
		if !letter && (i == 0 || !strings.ContainsRune("0123456789+.-", rune(c))) {
			return false
		}
	}
	return true
}

// Check returns an error if no store can be found for a URL, for instance because its scheme is
// unknown. It sends no request.
func Check(address string) error {
	scheme, rest, ok := strings.Cut(address, "://")
	if !ok {
		return fmt.Errorf("%s is not a URL", address)
	}
	scheme = strings.ToLower(scheme)
	if schemes[scheme] == nil {
		return fmt.Errorf("%s: unknown scheme %q; mula knows %s", Clean(address), scheme, schemeNames)
	}
	if rest == "" || rest[0] == '/' {
		return fmt.Errorf("%s: the name after %s:// is missing", Clean(address), scheme)
	}
	return nil
}

// CheckWritable is [Check] for a URL to which objects are to be written.
func CheckWritable(address string) error {
	if err := Check(address); err != nil {
		return err
	}
	scheme, _, _ := strings.Cut(address, "://")
	switch strings.ToLower(scheme) {
	case "s3", "gs", "az":
		return nil
	}
	return fmt.Errorf("%s is in a store that mula only reads; name a bucket of s3, gs or az", Clean(address))
}

// locate finds the store of a URL.
func locate(ctx context.Context, address string) (location, error) {
	if err := Check(address); err != nil {
		return location{}, err
	}
	scheme, rest, _ := strings.Cut(address, "://")
	scheme = strings.ToLower(scheme)
	l, err := schemes[scheme](ctx, scheme, rest)
	if err != nil {
		return location{}, fmt.Errorf("%s: %w", Clean(address), err)
	}
	return l, nil
}

// locateObject is locate for a URL that must have a key.
func locateObject(ctx context.Context, address string) (location, error) {
	l, err := locate(ctx, address)
	if err == nil && l.key == "" {
		err = fmt.Errorf("%s names no object; add its key", Clean(address))
	}
	return l, err
}

// splitBucket divides BUCKET/KEY.
func splitBucket(scheme, rest string, find func(bucket string) (store, error)) (location, error) {
	bucket, key, _ := strings.Cut(rest, "/")
	s, err := find(bucket)
	return location{store: s, key: key, base: scheme + "://" + bucket + "/"}, err
}

// Join appends a relative name with slashes to a URL, or to a local path.
func Join(base, name string) string {
	if IsURL(base) {
		return strings.TrimSuffix(base, "/") + "/" + name
	}
	return filepath.Join(base, filepath.FromSlash(name))
}

// Dir returns the folder of a path or a URL, without a slash at the end.
func Dir(path string) string {
	if IsURL(path) {
		return path[:strings.LastIndexByte(path, '/')]
	}
	return filepath.Dir(path)
}

// Stat returns the facts about an object. The error wraps [io/fs.ErrNotExist] if there is none.
func Stat(ctx context.Context, address string) (Info, error) {
	l, err := locateObject(ctx, address)
	if err != nil {
		return Info{}, err
	}
	var info Info
	err = retry(ctx, l, func(ctx context.Context) error {
		return limited(ctx, 0, func(ctx context.Context) error {
			info, err = l.stat(ctx, l.key)
			return err
		})
	})
	return info, err
}

// ReadFile returns the content of an object of at most limit bytes.
func ReadFile(ctx context.Context, address string, limit int64) ([]byte, Info, error) {
	l, err := locateObject(ctx, address)
	if err != nil {
		return nil, Info{}, err
	}
	var data []byte
	var info Info
	err = retry(ctx, l, func(ctx context.Context) error {
		b, err := l.open(ctx, 0, -1, Info{Size: -1})
		if err != nil {
			return err
		}
		defer b.Close()
		info = b.info
		if info.Size > limit {
			return fmt.Errorf("has %d bytes, and the limit is %d", info.Size, limit)
		}
		data, err = io.ReadAll(io.LimitReader(b, limit+1))
		switch {
		case err != nil:
			return temporary(err)
		case int64(len(data)) > limit:
			return fmt.Errorf("has more than %d bytes, the limit", limit)
		case info.Size >= 0 && int64(len(data)) != info.Size:
			return temporary(fmt.Errorf("the content ends after %d of %d bytes", len(data), info.Size))
		}
		info.Size = int64(len(data))
		return nil
	})
	if err != nil {
		return nil, Info{}, err
	}
	return data, info, nil
}

// Remove removes an object. An object that does not exist is no error.
func Remove(ctx context.Context, address string) error {
	l, err := locateObject(ctx, address)
	if err != nil {
		return err
	}
	return retry(ctx, l, func(ctx context.Context) error {
		err := limited(ctx, 0, func(ctx context.Context) error { return l.remove(ctx, l.key) })
		if f := (*failure)(nil); errors.As(err, &f) && f.status == http.StatusNotFound {
			return nil
		}
		return err
	})
}
