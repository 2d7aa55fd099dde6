package objects

import (
	"context"
	"errors"
	"fmt"
	"net/http"
)

// webClient follows redirects.
var webClient = &http.Client{Transport: client.Transport}

// locateWeb returns the store of one file: its key is the complete URL without the scheme, so that
// the query, which may be a signature, is kept.
func locateWeb(_ context.Context, scheme, rest string) (location, error) {
	base := scheme + "://"
	return location{store: webStore{base}, key: rest, base: base}, nil
}

type webStore struct{ base string }

var errReadOnly = fmt.Errorf("the store is read only: %w", errors.ErrUnsupported)

func (w webStore) send(ctx context.Context, method, key string, off, n int64) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, w.base+key, nil)
	if err != nil {
		return nil, errors.New("malformed URL") // the error has the URL, which may have credentials
	}
	setRange(req.Header, off, n)
	return send(webClient, req)
}

func (w webStore) stat(ctx context.Context, key string) (Info, error) {
	resp, err := w.send(ctx, http.MethodHead, key, 0, -1)
	if f := (*failure)(nil); errors.As(err, &f) {
		switch f.status {
		case http.StatusMethodNotAllowed, http.StatusNotImplemented, http.StatusForbidden, http.StatusBadRequest:
			// The server does not answer HEAD, or the URL has a signature for GET.
			if resp, err = w.send(ctx, http.MethodGet, key, 0, 1); errors.As(err, &f) &&
				f.status == http.StatusRequestedRangeNotSatisfiable { // the file is empty
				resp, err = w.send(ctx, http.MethodGet, key, 0, -1)
			}
		}
	}
	if err != nil {
		return Info{}, err
	}
	defer resp.Body.Close()
	info := w.info(resp)
	if info.Size = resp.ContentLength; resp.StatusCode == http.StatusPartialContent {
		_, info.Size, err = contentRange(resp.Header.Get("Content-Range"), 0, 1, -1)
	}
	return info, err
}

// info uses the time of the last change as version if there is no ETag.
func (w webStore) info(r *http.Response) Info {
	info := taggedInfo(r.Header)
	if info.Version == "" {
		info.Version = r.Header.Get("Last-Modified")
	}
	return info
}

func (w webStore) get(ctx context.Context, key string, off, n int64, _ string) (*http.Response, error) {
	return w.send(ctx, http.MethodGet, key, off, n)
}

func (w webStore) list(context.Context, string, bool, string) ([]Entry, string, error) {
	return nil, "", fmt.Errorf("a web server has no list of its files; name each file: %w", errors.ErrUnsupported)
}

func (w webStore) put(context.Context, string, []byte, condition) (string, error) {
	return "", errReadOnly
}

func (w webStore) upload(context.Context, string) (upload, error) { return nil, errReadOnly }

func (w webStore) remove(context.Context, string) error { return errReadOnly }
