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
	"strconv"
	"strings"
	"time"

	"golang.org/x/oauth2"
	"golang.org/x/oauth2/google"
)

// A gcsAccount has the application default credentials.
type gcsAccount struct {
	base   string             // of all URLs
	tokens oauth2.TokenSource // nil for an emulator, and for public buckets
	why    error              // why there are no credentials
}

// gcsSettings are the variables on which an account depends.
var gcsSettings = []string{"STORAGE_EMULATOR_HOST", "GOOGLE_APPLICATION_CREDENTIALS", "CLOUDSDK_CONFIG", "HOME"}

var gcsAccounts perSettings[*gcsAccount]

func loadGCS() (*gcsAccount, error) {
	if host := os.Getenv("STORAGE_EMULATOR_HOST"); host != "" {
		if !strings.Contains(host, "://") {
			host = "http://" + host
		}
		u, err := url.Parse(host)
		if err != nil || u.Host == "" {
			return nil, errors.New("STORAGE_EMULATOR_HOST must be a host and port, such as 127.0.0.1:4443")
		}
		return &gcsAccount{base: u.Scheme + "://" + u.Host}, nil
	}
	a := &gcsAccount{base: "https://storage.googleapis.com"}
	// The credentials are used after the end of the operation that needs them first.
	const scope = "https://www.googleapis.com/auth/devstorage.read_write"
	c, err := google.FindDefaultCredentials(context.Background(), scope)
	switch {
	case err == nil:
		a.tokens = c.TokenSource
	case os.Getenv("GOOGLE_APPLICATION_CREDENTIALS") != "":
		return nil, fmt.Errorf("GOOGLE_APPLICATION_CREDENTIALS: %w", err)
	default:
		a.why = err
	}
	return a, nil
}

func locateGCS(_ context.Context, scheme, rest string) (location, error) {
	return splitBucket(scheme, rest, func(bucket string) (store, error) {
		a, err := gcsAccounts.get(gcsSettings, loadGCS)
		return &gcsStore{a, bucket}, err
	})
}

type gcsStore struct {
	*gcsAccount
	bucket string
}

func (s *gcsStore) object(key string, query url.Values) string {
	return fmt.Sprintf("%s/storage/v1/b/%s/o/%s?%s", s.base, s.bucket, url.PathEscape(key), query.Encode())
}

func (s *gcsStore) send(ctx context.Context, method, address string, h http.Header, data []byte, accept ...int) (
	*http.Response, error) {
	req, err := newRequest(ctx, method, address, h, data)
	if err != nil {
		return nil, err
	}
	if s.tokens != nil {
		token, err := s.tokens.Token()
		if err != nil {
			return nil, tokenError(err)
		}
		token.SetAuthHeader(req)
	}
	resp, err := send(client, req, accept...)
	if s.why != nil && errors.Is(err, fs.ErrPermission) {
		err = fmt.Errorf("%w; no credentials for Google Cloud were found: %w", err, s.why)
	}
	return resp, err
}

// tokenError is the error of a request for a token, without the response, which may have secrets.
func tokenError(err error) error {
	if refused := (*oauth2.RetrieveError)(nil); errors.As(err, &refused) {
		if refused.Response != nil && refused.Response.StatusCode >= 500 {
			return temporary(fmt.Errorf("requesting a token: %s", refused.Response.Status))
		}
		return fmt.Errorf("requesting a token: %w: %s %s", fs.ErrPermission, refused.ErrorCode,
			refused.ErrorDescription)
	}
	if wrapped := (*url.Error)(nil); errors.As(err, &wrapped) {
		return temporary(fmt.Errorf("requesting a token: %w", wrapped.Err))
	}
	return fmt.Errorf("requesting a token: %w", err)
}

// A gcsObject is the metadata of an object.
type gcsObject struct {
	Name       string
	Size       string
	Generation string
	Updated    time.Time
}

func (o gcsObject) info() (Info, error) {
	size, err := strconv.ParseInt(o.Size, 10, 64)
	if err != nil {
		return Info{}, temporary(fmt.Errorf("the store sent the size %q of an object", o.Size))
	}
	return Info{size, o.Generation, o.Updated}, nil
}

func (s *gcsStore) stat(ctx context.Context, key string) (Info, error) {
	resp, err := s.send(ctx, http.MethodGet, s.object(key, nil), nil, nil)
	if err != nil {
		return Info{}, err
	}
	var o gcsObject
	if err := decode(resp, json.Unmarshal, &o); err != nil {
		return Info{}, err
	}
	return o.info()
}

func (s *gcsStore) get(ctx context.Context, key string, off, n int64, version string) (*http.Response, error) {
	query := url.Values{"alt": {"media"}}
	if version != "" {
		query.Set("ifGenerationMatch", version)
	}
	h := http.Header{"Accept-Encoding": {"gzip"}} // objects are read as they are stored
	setRange(h, off, n)
	return s.send(ctx, http.MethodGet, s.object(key, query), h, nil)
}

func (s *gcsStore) info(r *http.Response) Info {
	info := Info{Version: r.Header.Get("X-Goog-Generation")}
	info.Modified, _ = http.ParseTime(r.Header.Get("Last-Modified")) // else the zero time
	return info
}

func (s *gcsStore) list(ctx context.Context, prefix string, flat bool, token string) (entries []Entry, next string,
	err error) {
	query := url.Values{"prefix": {prefix}, "fields": {"items(name,size,generation,updated),nextPageToken"}}
	if flat {
		query.Set("delimiter", "/")
	}
	if token != "" {
		query.Set("pageToken", token)
	}
	address := fmt.Sprintf("%s/storage/v1/b/%s/o?%s", s.base, s.bucket, query.Encode())
	resp, err := s.send(ctx, http.MethodGet, address, nil, nil)
	if err != nil {
		return nil, "", err
	}
	var page struct {
		Items         []gcsObject
		NextPageToken string
	}
	if err := decode(resp, json.Unmarshal, &page); err != nil {
		return nil, "", err
	}
	for _, o := range page.Items {
		info, err := o.info()
		if err != nil {
			return nil, "", err
		}
		entries = append(entries, Entry{o.Name, info})
	}
	return entries, page.NextPageToken, nil
}

func (s *gcsStore) uploadAddress(key, kind string, c condition) string {
	query := url.Values{"uploadType": {kind}, "name": {key}}
	if c.absent {
		query.Set("ifGenerationMatch", "0")
	}
	if c.version != "" {
		query.Set("ifGenerationMatch", c.version)
	}
	return fmt.Sprintf("%s/upload/storage/v1/b/%s/o?%s", s.base, s.bucket, query.Encode())
}

func (s *gcsStore) put(ctx context.Context, key string, data []byte, c condition) (version string, err error) {
	h := http.Header{"Content-Type": {"application/octet-stream"}}
	resp, err := s.send(ctx, http.MethodPost, s.uploadAddress(key, "media", c), h, data)
	if err != nil {
		return "", err
	}
	var o gcsObject
	err = decode(resp, json.Unmarshal, &o)
	return o.Generation, err
}

func (s *gcsStore) remove(ctx context.Context, key string) error {
	return done(s.send(ctx, http.MethodDelete, s.object(key, nil), nil, nil))
}

func (s *gcsStore) upload(ctx context.Context, key string) (upload, error) {
	h := http.Header{"X-Upload-Content-Type": {"application/octet-stream"}}
	resp, err := s.send(ctx, http.MethodPost, s.uploadAddress(key, "resumable", condition{}), h, nil)
	if err != nil {
		return nil, err
	}
	discard(resp.Body)
	at := resp.Header.Get("Location")
	if at == "" {
		return nil, temporary(errors.New("the store sent no address for an upload"))
	}
	return &gcsUpload{gcsStore: s, at: at}, nil
}

// A gcsUpload is a resumable upload. All its parts but the last are multiples of 256 KiB.
type gcsUpload struct {
	*gcsStore
	at      string // the address of the upload
	last    []byte // the last part, which finish sends with the size of the object
	lastOff int64
	unsure  bool // the response to a request was lost, so the store may have more bytes
}

func (u *gcsUpload) parallel() int { return 1 }

func (u *gcsUpload) part(ctx context.Context, _ int, off int64, data []byte) error {
	if u.last != nil && u.lastOff < off {
		if err := u.sendTo(ctx, -1); err != nil {
			return err
		}
	}
	u.last, u.lastOff = append(u.last[:0], data...), off
	return nil
}

func (u *gcsUpload) finish(ctx context.Context, _ int, size int64) error { return u.sendTo(ctx, size) }

// sendTo sends the last part. size is the size of the object, or -1 if more parts follow.
func (u *gcsUpload) sendTo(ctx context.Context, size int64) error {
	end := u.lastOff + int64(len(u.last))
	total := "*"
	if size >= 0 {
		total = strconv.FormatInt(size, 10)
	}
	from := u.lastOff
	if u.unsure {
		h := http.Header{"Content-Range": {"bytes */" + total}}
		resp, err := u.send(ctx, http.MethodPut, u.at, h, nil, http.StatusPermanentRedirect)
		if err != nil {
			return err
		}
		discard(resp.Body)
		if resp.StatusCode/100 == 2 {
			return nil
		}
		from = received(resp)
	}
	for from < end || size >= 0 {
		if from < u.lastOff || from > end {
			return fmt.Errorf("the store has %d bytes of an upload, after %d were sent", from, end)
		}
		h := http.Header{"Content-Range": {fmt.Sprintf("bytes %d-%d/%s", from, end-1, total)}}
		if from == end {
			h.Set("Content-Range", "bytes */"+total)
		}
		u.unsure = true
		resp, err := u.send(ctx, http.MethodPut, u.at, h, u.last[from-u.lastOff:], http.StatusPermanentRedirect)
		if err != nil {
			return err
		}
		discard(resp.Body)
		u.unsure = false
		if resp.StatusCode/100 == 2 {
			return nil
		}
		now := received(resp)
		if now <= from {
			return temporary(errors.New("the store did not keep any byte of a part"))
		}
		from = now
	}
	return nil
}

// received returns how many bytes of an upload the store has.
func received(resp *http.Response) int64 {
	_, last, _ := strings.Cut(resp.Header.Get("Range"), "-")
	n, err := strconv.ParseInt(last, 10, 64)
	if err != nil {
		return 0 // there is no range before the first byte
	}
	return n + 1
}

func (u *gcsUpload) abort(ctx context.Context) error {
	return done(u.send(ctx, http.MethodDelete, u.at, nil, nil, 499)) // 499: cancelled
}
