package objects

import (
	"context"
	"net/http"
	"net/url"
	"strings"
)

// tagged has the operations that S3 and Azure have in common: the version of an object is its ETag.
type tagged struct {
	send func(ctx context.Context, method, key string, query url.Values, h http.Header, data []byte) (
		*http.Response, error)
}

func (s tagged) stat(ctx context.Context, key string) (Info, error) {
	resp, err := s.send(ctx, http.MethodHead, key, nil, nil, nil)
	if err != nil {
		return Info{}, err
	}
	resp.Body.Close()
	info := s.info(resp)
	info.Size = resp.ContentLength
	return info, nil
}

func (s tagged) info(r *http.Response) Info { return taggedInfo(r.Header) }

// taggedInfo returns the facts in a response with an ETag.
func taggedInfo(h http.Header) Info {
	info := Info{Version: strings.Trim(h.Get("ETag"), `"`)}
	info.Modified, _ = http.ParseTime(h.Get("Last-Modified")) // else the zero time
	return info
}

func (s tagged) get(ctx context.Context, key string, off, n int64, version string) (*http.Response, error) {
	h := http.Header{}
	setRange(h, off, n)
	if version != "" {
		h.Set("If-Match", `"`+version+`"`)
	}
	return s.send(ctx, http.MethodGet, key, nil, h, nil)
}

func (s tagged) remove(ctx context.Context, key string) error {
	return done(s.send(ctx, http.MethodDelete, key, nil, nil, nil))
}

// putIf writes an object.
func (s tagged) putIf(ctx context.Context, key string, h http.Header, data []byte, c condition) (version string,
	err error) {
	if c.absent {
		h.Set("If-None-Match", "*")
	}
	if c.version != "" {
		h.Set("If-Match", `"`+c.version+`"`)
	}
	resp, err := s.send(ctx, http.MethodPut, key, nil, h, data)
	if err := done(resp, err); err != nil {
		return "", err
	}
	return s.info(resp).Version, nil
}
