package objects

import (
	"context"
	"crypto/hmac"
	"crypto/md5"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/xml"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/Azure/azure-sdk-for-go/sdk/azcore"
	"github.com/Azure/azure-sdk-for-go/sdk/azcore/policy"
	"github.com/Azure/azure-sdk-for-go/sdk/azidentity"
)

// azureVersion is the version of the interface.
const azureVersion = "2021-12-02"

// An azureAccount has one of: the key of a storage account, a shared access signature, the default
// credential. Without them public containers can be read.
type azureAccount struct {
	base       string // of all URLs
	account    string
	key        []byte
	signature  url.Values
	credential azcore.TokenCredential
}

// azureSettings are the variables on which an account depends.
var azureSettings = []string{
	"AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT", "AZURE_STORAGE_KEY", "AZURE_STORAGE_SAS_TOKEN",
	"AZURE_CLIENT_ID", "AZURE_TENANT_ID", "AZURE_CLIENT_SECRET", "AZURE_FEDERATED_TOKEN_FILE",
}

var azureAccounts perSettings[*azureAccount]

// The account and the key of Azure's own emulators, which are public.
const (
	emulatorAccount = "devstoreaccount1"
	emulatorKey     = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)

func loadAzure() (*azureAccount, error) {
	a := &azureAccount{account: os.Getenv("AZURE_STORAGE_ACCOUNT")}
	key, signature := os.Getenv("AZURE_STORAGE_KEY"), os.Getenv("AZURE_STORAGE_SAS_TOKEN")
	if text := os.Getenv("AZURE_STORAGE_CONNECTION_STRING"); text != "" {
		settings := make(map[string]string)
		for _, part := range strings.Split(text, ";") {
			if name, value, ok := strings.Cut(part, "="); ok {
				settings[strings.TrimSpace(name)] = strings.TrimSpace(value)
			}
		}
		a.account, key, signature = settings["AccountName"], settings["AccountKey"], settings["SharedAccessSignature"]
		if strings.EqualFold(settings["UseDevelopmentStorage"], "true") {
			a.account, key, a.base = emulatorAccount, emulatorKey, "http://127.0.0.1:10000/"+emulatorAccount
		}
		if settings["BlobEndpoint"] != "" {
			a.base = settings["BlobEndpoint"]
		} else if a.base == "" && a.account != "" {
			suffix, protocol := settings["EndpointSuffix"], settings["DefaultEndpointsProtocol"]
			if suffix == "" {
				suffix = "core.windows.net"
			}
			if protocol == "" {
				protocol = "https"
			}
			a.base = protocol + "://" + a.account + ".blob." + suffix
		}
	} else if a.account != "" {
		a.base = "https://" + a.account + ".blob.core.windows.net"
	}
	if a.base == "" {
		return nil, errors.New("set AZURE_STORAGE_ACCOUNT or AZURE_STORAGE_CONNECTION_STRING, which name the account")
	}
	a.base = strings.TrimSuffix(a.base, "/")
	var err error
	switch {
	case key != "":
		if a.key, err = base64.StdEncoding.DecodeString(key); err != nil {
			return nil, errors.New("the account's key is not base64")
		}
	case signature != "":
		if a.signature, err = url.ParseQuery(strings.TrimPrefix(signature, "?")); err != nil {
			return nil, errors.New("the shared access signature is not the query of a URL")
		}
	default:
		c, err := azidentity.NewDefaultAzureCredential(nil)
		if err != nil {
			return nil, err
		}
		a.credential = c
	}
	return a, nil
}

func locateAzure(_ context.Context, scheme, rest string) (location, error) {
	return splitBucket(scheme, rest, func(container string) (store, error) {
		a, err := azureAccounts.get(azureSettings, loadAzure)
		s := &azureStore{azureAccount: a, container: container}
		s.send = s.sendSigned
		return s, err
	})
}

type azureStore struct {
	tagged
	*azureAccount
	container string
}

// sendSigned sends a request with the account's credentials.
func (s *azureStore) sendSigned(ctx context.Context, method, key string, query url.Values, h http.Header, data []byte) (
	*http.Response, error) {
	address := s.base + "/" + escapePath(s.container)
	if key != "" {
		address += "/" + escapePath(key)
	}
	req, err := newRequest(ctx, method, address, h, data)
	if err != nil {
		return nil, err
	}
	req.Header.Set("X-Ms-Version", azureVersion)
	req.Header.Set("X-Ms-Date", time.Now().UTC().Format(http.TimeFormat))
	if len(data) > 0 {
		sum := md5.Sum(data)
		req.Header.Set("Content-MD5", base64.StdEncoding.EncodeToString(sum[:])) // the store compares it
	}
	req.URL.RawQuery = strings.ReplaceAll(query.Encode(), "+", "%20")
	missing := error(nil)
	switch {
	case s.key != nil:
		s.sign(req, query)
	case s.signature != nil:
		all := url.Values{}
		for _, values := range []url.Values{s.signature, query} {
			for name := range values {
				all.Set(name, values.Get(name))
			}
		}
		req.URL.RawQuery = strings.ReplaceAll(all.Encode(), "+", "%20")
	default:
		var token azcore.AccessToken
		token, missing = s.credential.GetToken(ctx, policy.TokenRequestOptions{
			Scopes: []string{"https://storage.azure.com/.default"}})
		if missing == nil {
			req.Header.Set("Authorization", "Bearer "+token.Token)
		} else if ctx.Err() != nil {
			return nil, ctx.Err()
		}
	}
	resp, err := send(client, req)
	if missing != nil && (errors.Is(err, fs.ErrPermission) || errors.Is(err, fs.ErrNotExist)) {
		// a private container does not exist for others
		err = fmt.Errorf("%w; there is no key, no shared access signature and no default credential of Azure: %w", err,
			missing)
	}
	return resp, err
}

// sign signs a request with the account's key, as Azure's documentation of "Shared Key" defines.
func (s *azureStore) sign(req *http.Request, query url.Values) {
	length := ""
	if req.ContentLength > 0 {
		length = strconv.FormatInt(req.ContentLength, 10)
	}
	lines := []string{req.Method, "", "", length}
	for _, name := range []string{"Content-MD5", "Content-Type", "Date", "If-Modified-Since", "If-Match",
		"If-None-Match", "If-Unmodified-Since", "Range"} {
		lines = append(lines, req.Header.Get(name))
	}
	var own []string
	for name := range req.Header {
		if lower := strings.ToLower(name); strings.HasPrefix(lower, "x-ms-") {
			own = append(own, lower+":"+req.Header.Get(name))
		}
	}
	slices.Sort(own)
	lines = append(append(lines, own...), "/"+s.account+req.URL.EscapedPath())
	var parameters []string
	for name := range query {
		parameters = append(parameters, name+":"+query.Get(name))
	}
	slices.Sort(parameters)
	mac := hmac.New(sha256.New, s.key)
	mac.Write([]byte(strings.Join(append(lines, parameters...), "\n")))
	req.Header.Set("Authorization", "SharedKey "+s.account+":"+base64.StdEncoding.EncodeToString(mac.Sum(nil)))
}

func (s *azureStore) list(ctx context.Context, prefix string, flat bool, token string) (entries []Entry, next string,
	err error) {
	query := url.Values{"restype": {"container"}, "comp": {"list"}, "prefix": {prefix}}
	if flat {
		query.Set("delimiter", "/")
	}
	if token != "" {
		query.Set("marker", token)
	}
	type name struct {
		Encoded bool   `xml:"Encoded,attr"`
		Text    string `xml:",chardata"`
	}
	var page struct {
		Blob []struct {
			Name       name
			Properties struct {
				Length  int64  `xml:"Content-Length"`
				ETag    string `xml:"Etag"`
				Changed string `xml:"Last-Modified"`
			}
		} `xml:"Blobs>Blob"`
		NextMarker string
	}
	resp, err := s.send(ctx, http.MethodGet, "", query, nil, nil)
	if err == nil {
		err = decode(resp, xml.Unmarshal, &page)
	}
	if err != nil {
		return nil, "", err
	}
	for _, b := range page.Blob {
		key := b.Name.Text
		if b.Name.Encoded {
			if key, err = url.PathUnescape(key); err != nil {
				return nil, "", fmt.Errorf("unreadable key %q in the store's list: %w", b.Name.Text, err)
			}
		}
		info := Info{Size: b.Properties.Length, Version: strings.Trim(b.Properties.ETag, `"`)}
		info.Modified, _ = http.ParseTime(b.Properties.Changed) // else the zero time
		entries = append(entries, Entry{key, info})
	}
	return entries, page.NextMarker, nil
}

func (s *azureStore) put(ctx context.Context, key string, data []byte, c condition) (version string, err error) {
	version, err = s.putIf(ctx, key, http.Header{"X-Ms-Blob-Type": {"BlockBlob"}}, data, c)
	if f := (*failure)(nil); c.absent && errors.As(err, &f) && f.status == http.StatusConflict {
		f.kind = ErrChanged // the blob exists
	}
	return version, err
}

func (s *azureStore) upload(_ context.Context, key string) (upload, error) {
	return &azureUpload{s, key, rand.Text()}, nil
}

// An azureUpload is a list of blocks. Azure removes blocks that are in no list after a week.
type azureUpload struct {
	*azureStore
	key, mark string
}

func (u *azureUpload) parallel() int { return 4 }

// block returns the name of a part. All names of a blob's blocks have the same length.
func (u *azureUpload) block(n int) string {
	return base64.StdEncoding.EncodeToString(fmt.Appendf(nil, "%s-%06d", u.mark, n))
}

func (u *azureUpload) part(ctx context.Context, n int, _ int64, data []byte) error {
	query := url.Values{"comp": {"block"}, "blockid": {u.block(n)}}
	return done(u.send(ctx, http.MethodPut, u.key, query, nil, data))
}

func (u *azureUpload) finish(ctx context.Context, parts int, _ int64) error {
	list := struct {
		XMLName xml.Name `xml:"BlockList"`
		Latest  []string
	}{}
	for i := range parts {
		list.Latest = append(list.Latest, u.block(i))
	}
	text, err := xml.Marshal(list)
	if err != nil {
		return err
	}
	return done(u.send(ctx, http.MethodPut, u.key, url.Values{"comp": {"blocklist"}}, nil, text))
}

func (u *azureUpload) abort(context.Context) error { return nil }
