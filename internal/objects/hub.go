package objects

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
)

// A hubStore is a data set of the Hugging Face hub at a revision. The hub answers a request for a
// file with a redirect to a server of content, which does not know the hub's token.
type hubStore struct {
	endpoint, token string
	repository      string // OWNER/NAME
	revision        string

	mutex   sync.Mutex
	content map[string]*url.URL // by version and path, where the hub redirected to
}

// hubSettings are the variables on which a token and an endpoint depend.
var hubSettings = []string{"HF_ENDPOINT", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH", "HF_HOME", "HOME"}

var hubs perSettings[*sync.Map] // of stores, by repository and revision

// hubPath divides OWNER/NAME@REVISION/PATH. A slash in a revision is %2F, except in the two kinds
// of names that the hub makes itself.
var hubPath = regexp.MustCompile(
	`^datasets/([^/@]+/[^/@]+)(?:@(refs/convert/[^/]+|refs/pr/[0-9]+|[^/]+))?(?:/(.*))?$`)

func locateHub(_ context.Context, scheme, rest string) (location, error) {
	m := hubPath.FindStringSubmatch(rest)
	if m == nil {
		return location{}, errors.New("must be hf://datasets/OWNER/NAME/PATH or hf://datasets/OWNER/NAME@REVISION/PATH")
	}
	repository, revision, key := m[1], m[2], m[3]
	base := scheme + "://" + strings.TrimSuffix(rest[:len(rest)-len(key)], "/") + "/"
	if revision == "" {
		revision = "main"
	}
	revision, err := url.PathUnescape(revision)
	if err != nil {
		return location{}, fmt.Errorf("malformed revision: %w", err)
	}
	stores, err := hubs.get(hubSettings, func() (*sync.Map, error) { return new(sync.Map), nil })
	if err != nil {
		return location{}, err
	}
	s := &hubStore{endpoint: "https://huggingface.co", token: hubToken(), repository: repository, revision: revision,
		content: make(map[string]*url.URL)}
	if e := os.Getenv("HF_ENDPOINT"); e != "" {
		s.endpoint = strings.TrimSuffix(e, "/")
	}
	kept, _ := stores.LoadOrStore(repository+"@"+revision, s)
	return location{store: kept.(*hubStore), key: key, base: base}, nil
}

// hubToken returns the token of the environment, or of the file that `hf auth login` writes.
func hubToken() string {
	for _, name := range []string{"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"} {
		if token := strings.TrimSpace(os.Getenv(name)); token != "" {
			return token
		}
	}
	file := os.Getenv("HF_TOKEN_PATH")
	if file == "" {
		home := os.Getenv("HF_HOME")
		if home == "" {
			cache := os.Getenv("XDG_CACHE_HOME")
			if cache == "" {
				user, err := os.UserHomeDir()
				if err != nil {
					return ""
				}
				cache = filepath.Join(user, ".cache")
			}
			home = filepath.Join(cache, "huggingface")
		}
		file = filepath.Join(home, "token")
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return "" // public data sets need no token
	}
	return strings.TrimSpace(string(text))
}

// request sends a request to the hub, which may answer with a redirect.
func (s *hubStore) request(ctx context.Context, method, address string, h http.Header) (*http.Response, error) {
	for range 5 {
		req, err := newRequest(ctx, method, address, h, nil)
		if err != nil {
			return nil, err
		}
		if s.token != "" {
			req.Header.Set("Authorization", "Bearer "+s.token)
		}
		resp, err := send(client, req, http.StatusMovedPermanently, http.StatusFound, http.StatusTemporaryRedirect,
			http.StatusPermanentRedirect)
		if err != nil {
			f := (*failure)(nil)
			if errors.As(err, &f) && errors.Is(f, fs.ErrPermission) && s.token == "" {
				err = fmt.Errorf("%w; set HF_TOKEN for a private or gated data set", err)
			}
			return nil, err
		}
		to, err := resp.Location()
		if err != nil || resp.Header.Get("X-Linked-Etag") != "" || to.Host != req.URL.Host {
			return resp, nil
		}
		resp.Body.Close() // the repository was renamed, or the hub has another address for small files
		address = to.String()
	}
	return nil, errors.New("too many redirects of the hub")
}

// resolve returns the hub's response to a request for a file, often a redirect.
func (s *hubStore) resolve(ctx context.Context, method, key string, h http.Header) (*http.Response, error) {
	return s.request(ctx, method, fmt.Sprintf("%s/datasets/%s/resolve/%s/%s", s.endpoint, s.repository,
		url.PathEscape(s.revision), escapePath(key)), h)
}

func (s *hubStore) stat(ctx context.Context, key string) (Info, error) {
	resp, err := s.resolve(ctx, http.MethodHead, key, nil)
	if err != nil {
		return Info{}, err
	}
	resp.Body.Close()
	info := s.info(resp)
	info.Size = resp.ContentLength
	if text := resp.Header.Get("X-Linked-Size"); text != "" {
		if _, err := fmt.Sscan(text, &info.Size); err != nil {
			return Info{}, fmt.Errorf("the hub's header X-Linked-Size is %q", text)
		}
	}
	return info, nil
}

// info uses the hash of the content as version, which the hub's list has also.
func (s *hubStore) info(r *http.Response) Info {
	tag := r.Header.Get("X-Linked-Etag")
	if tag == "" {
		tag = r.Header.Get("ETag")
	}
	return Info{Version: strings.Trim(strings.TrimPrefix(tag, "W/"), `"`)}
}

// get asks the hub for the server of the content, which may answer requests for the same version
// later.
func (s *hubStore) get(ctx context.Context, key string, off, n int64, version string) (*http.Response, error) {
	h := http.Header{}
	setRange(h, off, n)
	id := version + " " + key
	s.mutex.Lock()
	at := s.content[id]
	s.mutex.Unlock()
	if at == nil {
		resp, err := s.resolve(ctx, http.MethodGet, key, h)
		if err != nil || resp.StatusCode/100 == 2 {
			return resp, err
		}
		resp.Body.Close()
		found := s.info(resp).Version
		if version != "" && found != version {
			return nil, fmt.Errorf("%w: its version was %s, and is %s", ErrChanged, version, found)
		}
		version, id = found, found+" "+key
		if at, err = resp.Location(); err != nil {
			return nil, fmt.Errorf("the hub redirects without an address (status %d)", resp.StatusCode)
		}
		s.mutex.Lock()
		s.content[id] = at
		s.mutex.Unlock()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, at.String(), nil)
	if err != nil {
		return nil, errors.New("the hub redirects to a malformed address") // which may have a signature
	}
	req.Header = h
	resp, err := send(webClient, req)
	if err != nil {
		s.mutex.Lock()
		delete(s.content, id) // the address may have expired
		s.mutex.Unlock()
		if f := (*failure)(nil); errors.As(err, &f) && f.status != http.StatusRequestedRangeNotSatisfiable {
			f.again = true
		}
		return nil, err
	}
	resp.Header.Set("X-Linked-Etag", version) // the content's server has other ones
	return resp, nil
}

var nextLink = regexp.MustCompile(`<([^>]*)>;\s*rel="next"`)

func (s *hubStore) list(ctx context.Context, prefix string, flat bool, token string) (entries []Entry, next string,
	err error) {
	folder := ""
	if i := strings.LastIndexByte(prefix, '/'); i >= 0 {
		folder = "/" + escapePath(prefix[:i])
	}
	address := fmt.Sprintf("%s/api/datasets/%s/tree/%s%s?recursive=%t", s.endpoint, s.repository,
		url.PathEscape(s.revision), folder, !flat)
	for address != "" { // the hub lists folders first, so all pages are needed for the order
		resp, err := s.request(ctx, http.MethodGet, address, nil)
		if f := (*failure)(nil); errors.As(err, &f) && f.header.Get("X-Error-Code") == "EntryNotFound" {
			return nil, "", nil // there is no such folder
		}
		if err != nil {
			return nil, "", err
		}
		var page []struct {
			Type, Path, OID string
			Size            int64
			LFS             *struct{ OID string }
		}
		if err := decode(resp, json.Unmarshal, &page); err != nil {
			return nil, "", err
		}
		for _, f := range page {
			if f.Type != "file" || !strings.HasPrefix(f.Path, prefix) {
				continue
			}
			e := Entry{URL: f.Path, Info: Info{Size: f.Size, Version: f.OID}}
			if f.LFS != nil {
				e.Version = f.LFS.OID
			}
			entries = append(entries, e)
		}
		address = ""
		if m := nextLink.FindStringSubmatch(resp.Header.Get("Link")); m != nil {
			address = m[1]
		}
	}
	slices.SortFunc(entries, func(a, b Entry) int { return strings.Compare(a.URL, b.URL) })
	return entries, "", nil
}

func (s *hubStore) put(context.Context, string, []byte, condition) (string, error) {
	return "", errReadOnly
}

func (s *hubStore) upload(context.Context, string) (upload, error) { return nil, errReadOnly }

func (s *hubStore) remove(context.Context, string) error { return errReadOnly }
