package objects

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/xml"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	signer "github.com/aws/aws-sdk-go-v2/aws/signer/v4"
	awshttp "github.com/aws/aws-sdk-go-v2/aws/transport/http"
	"github.com/aws/aws-sdk-go-v2/config"
)

// An s3Account has the settings of the AWS SDK.
type s3Account struct {
	credentials *aws.CredentialsCache
	endpoint    string // of a server with the interface of S3; "" for Amazon
	region      string
	regions     sync.Map // by bucket, of buckets in other regions
	signer      *signer.Signer
	client      *http.Client // trusts the certificates of AWS_CA_BUNDLE
}

// s3Settings are the variables on which an account depends. Tests change them within a process.
var s3Settings = []string{
	"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "AWS_REGION",
	"AWS_DEFAULT_REGION", "AWS_PROFILE", "AWS_DEFAULT_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE",
	"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_CA_BUNDLE",
}

var s3Accounts perSettings[*s3Account]

// perSettings keeps a value for each combination of environment variables.
type perSettings[T any] struct {
	mutex  sync.Mutex
	values map[[sha256.Size]byte]T
}

func (p *perSettings[T]) get(names []string, load func() (T, error)) (T, error) {
	h := sha256.New()
	for _, name := range names {
		fmt.Fprintf(h, "%q\n", os.Getenv(name))
	}
	key := [sha256.Size]byte(h.Sum(nil))
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if v, ok := p.values[key]; ok {
		return v, nil
	}
	v, err := load()
	if err == nil {
		if p.values == nil {
			p.values = make(map[[sha256.Size]byte]T)
		}
		p.values[key] = v
	}
	return v, err
}

func loadS3() (*s3Account, error) {
	// The credentials are used after the end of the operation that needs them first.
	c, err := config.LoadDefaultConfig(context.Background())
	if err != nil {
		return nil, fmt.Errorf("settings of AWS: %w", err)
	}
	a := &s3Account{region: c.Region, signer: signer.NewSigner(func(o *signer.SignerOptions) {
		o.DisableURIPathEscaping = true // the path is escaped once, as S3 requires
	})}
	if a.region == "" {
		a.region = "us-east-1"
	}
	a.client = client
	if b, ok := c.HTTPClient.(*awshttp.BuildableClient); ok {
		if tls := b.GetTransport().TLSClientConfig; tls != nil && tls.RootCAs != nil {
			t := newTransport()
			t.TLSClientConfig = tls
			a.client = &http.Client{Transport: t, CheckRedirect: client.CheckRedirect}
		}
	}
	a.credentials, _ = c.Credentials.(*aws.CredentialsCache)
	if a.endpoint, err = s3Endpoint(c); err != nil {
		return nil, err
	}
	return a, nil
}

// s3Endpoint returns the first of: AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, endpoint_url of the
// profile's service s3, endpoint_url of the profile.
func s3Endpoint(c aws.Config) (string, error) {
	endpoint := ""
	for _, source := range c.ConfigSources {
		if s, ok := source.(interface {
			GetServiceBaseEndpoint(context.Context, string) (string, bool, error)
		}); ok && endpoint == "" {
			endpoint, _, _ = s.GetServiceBaseEndpoint(context.Background(), "S3") // reads no file
		}
		if s, ok := source.(interface {
			GetIgnoreConfiguredEndpoints(context.Context) (bool, bool, error)
		}); ok {
			if ignore, found, _ := s.GetIgnoreConfiguredEndpoints(context.Background()); found && ignore {
				return "", nil
			}
		}
	}
	if endpoint == "" && c.BaseEndpoint != nil {
		endpoint = *c.BaseEndpoint
	}
	if endpoint == "" {
		return "", nil
	}
	u, err := url.Parse(endpoint)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return "", fmt.Errorf("AWS_ENDPOINT_URL is %q; it must be a URL such as http://127.0.0.1:9000", Clean(endpoint))
	}
	return strings.TrimSuffix(endpoint, "/"), nil
}

func locateS3(_ context.Context, scheme, rest string) (location, error) {
	return splitBucket(scheme, rest, func(bucket string) (store, error) {
		a, err := s3Accounts.get(s3Settings, loadS3)
		s := &s3Store{s3Account: a, bucket: bucket}
		s.send = s.sendSigned
		return s, err
	})
}

type s3Store struct {
	tagged
	*s3Account
	bucket string
}

// address returns the URL of a key. Buckets of Amazon have their own host names, unless a dot in
// the bucket's name does not fit the certificate.
func (s *s3Store) address(key, region string) string {
	path := "/" + s.bucket + "/" + key
	base := s.endpoint
	if base == "" {
		domain := region + ".amazonaws.com"
		if strings.HasPrefix(region, "cn-") {
			domain += ".cn"
		}
		base = "https://s3." + domain
		if !strings.Contains(s.bucket, ".") {
			base, path = "https://"+s.bucket+".s3."+domain, "/"+key
		}
	}
	return base + escapePath(path)
}

// escapePath escapes all bytes except letters, digits and -_.~/, as S3 signs paths.
func escapePath(path string) string {
	var b strings.Builder
	for _, c := range []byte(path) {
		if c|0x20 >= 'a' && c|0x20 <= 'z' || c >= '0' && c <= '9' || strings.IndexByte("-_.~/", c) >= 0 {
			b.WriteByte(c)
		} else {
			fmt.Fprintf(&b, "%%%02X", c)
		}
	}
	return b.String()
}

// sendSigned sends a signed request. If the bucket is in another region, it sends the request
// there.
func (s *s3Store) sendSigned(ctx context.Context, method, key string, query url.Values, h http.Header, data []byte) (
	*http.Response, error) {
	for second := false; ; second = true {
		region := s.region
		if r, ok := s.regions.Load(s.bucket); ok {
			region = r.(string)
		}
		resp, err := s.sendTo(ctx, region, method, key, query, h, data)
		f := (*failure)(nil)
		if !errors.As(err, &f) {
			return resp, err
		}
		if right := f.header.Get("X-Amz-Bucket-Region"); right != "" && right != region && s.endpoint == "" && !second {
			s.regions.Store(s.bucket, right)
			continue
		}
		if f.code == "ExpiredToken" && !second {
			s.credentials.Invalidate()
			continue
		}
		return resp, err
	}
}

func (s *s3Store) sendTo(ctx context.Context, region, method, key string, query url.Values, h http.Header,
	data []byte) (*http.Response, error) {
	req, err := newRequest(ctx, method, s.address(key, region), h, data)
	if err != nil {
		return nil, err
	}
	req.URL.RawQuery = query.Encode()
	sum := sha256.Sum256(data)
	hash := hex.EncodeToString(sum[:])
	req.Header.Set("X-Amz-Content-Sha256", hash)
	keys, missing := s.credentials.Retrieve(ctx)
	if missing == nil {
		if err := s.signer.SignHTTP(ctx, keys, req, hash, "s3", region, time.Now()); err != nil {
			return nil, fmt.Errorf("signing a request: %w", err)
		}
	} else if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	// Without credentials, public buckets can be read.
	resp, err := send(s.client, req)
	if missing != nil && errors.Is(err, fs.ErrPermission) {
		err = fmt.Errorf("%w; no credentials for S3 were found in AWS_ACCESS_KEY_ID, the shared configuration, or the "+
			"machine's role: %w", err, missing)
	}
	return resp, err
}

// unmarshalS3 is [xml.Unmarshal] for a response with status 200, which may still be an error of
// CompleteMultipartUpload.
func unmarshalS3(text []byte, out any) error {
	if code, message := storeError(text); code != "" {
		return &failure{status: http.StatusOK, code: code, message: message, again: true}
	}
	return xml.Unmarshal(text, out)
}

func (s *s3Store) list(ctx context.Context, prefix string, flat bool, token string) (entries []Entry, next string,
	err error) {
	query := url.Values{"list-type": {"2"}, "encoding-type": {"url"}, "prefix": {prefix}}
	if flat {
		query.Set("delimiter", "/")
	}
	if token != "" {
		query.Set("continuation-token", token)
	}
	var result struct {
		EncodingType          string
		IsTruncated           bool
		NextContinuationToken string
		Contents              []struct {
			Key          string
			Size         int64
			ETag         string
			LastModified time.Time
		}
	}
	resp, err := s.send(ctx, http.MethodGet, "", query, nil, nil)
	if err == nil {
		err = decode(resp, unmarshalS3, &result)
	}
	if err != nil {
		return nil, "", err
	}
	for _, c := range result.Contents {
		if result.EncodingType == "url" {
			if c.Key, err = url.QueryUnescape(c.Key); err != nil {
				return nil, "", fmt.Errorf("unreadable key %q in the store's list: %w", c.Key, err)
			}
		}
		entries = append(entries, Entry{c.Key, Info{c.Size, strings.Trim(c.ETag, `"`), c.LastModified}})
	}
	if result.IsTruncated && result.NextContinuationToken == "" {
		return nil, "", errors.New("the store's list is incomplete, and has no token for the rest")
	}
	return entries, result.NextContinuationToken, nil
}

func (s *s3Store) put(ctx context.Context, key string, data []byte, c condition) (version string, err error) {
	return s.putIf(ctx, key, http.Header{}, data, c)
}

// uploadMark is the metadata of an object of several parts. It tells a repeated finish that the
// first one has succeeded.
const uploadMark = "X-Amz-Meta-Mula-Upload"

func (s *s3Store) upload(ctx context.Context, key string) (upload, error) {
	u := &s3Upload{s3Store: s, key: key, mark: rand.Text()}
	var result struct {
		UploadID string `xml:"UploadId"`
	}
	resp, err := s.send(ctx, http.MethodPost, key, url.Values{"uploads": {""}}, http.Header{uploadMark: {u.mark}}, nil)
	if err == nil {
		err = decode(resp, unmarshalS3, &result)
	}
	u.id = result.UploadID
	return u, err
}

type s3Upload struct {
	*s3Store
	key, id, mark string

	mutex sync.Mutex
	tags  map[int]string // of the parts
}

func (u *s3Upload) parallel() int { return 4 }

func (u *s3Upload) part(ctx context.Context, n int, _ int64, data []byte) error {
	query := url.Values{"partNumber": {strconv.Itoa(n + 1)}, "uploadId": {u.id}}
	resp, err := u.send(ctx, http.MethodPut, u.key, query, nil, data)
	if err := done(resp, err); err != nil {
		return err
	}
	u.mutex.Lock()
	defer u.mutex.Unlock()
	if u.tags == nil {
		u.tags = make(map[int]string)
	}
	u.tags[n] = resp.Header.Get("ETag")
	return nil
}

func (u *s3Upload) finish(ctx context.Context, parts int, _ int64) error {
	type part struct {
		PartNumber int
		ETag       string
	}
	request := struct {
		XMLName xml.Name `xml:"CompleteMultipartUpload"`
		Part    []part
	}{}
	for i := range parts {
		request.Part = append(request.Part, part{i + 1, u.tags[i]})
	}
	text, err := xml.Marshal(request)
	if err != nil {
		return err
	}
	resp, err := u.send(ctx, http.MethodPost, u.key, url.Values{"uploadId": {u.id}}, nil, text)
	if err == nil {
		err = decode(resp, unmarshalS3, new(struct{}))
	}
	if errors.Is(err, fs.ErrNotExist) {
		resp, statErr := u.send(ctx, http.MethodHead, u.key, nil, nil, nil)
		switch {
		case statErr == nil:
			resp.Body.Close()
			if resp.Header.Get(uploadMark) == u.mark {
				return nil // an earlier try succeeded, and its response was lost
			}
		case !errors.Is(statErr, fs.ErrNotExist):
			return statErr // a temporary one has the effect that finish is called again
		}
	}
	return err
}

func (u *s3Upload) abort(ctx context.Context) error {
	return done(u.send(ctx, http.MethodDelete, u.key, url.Values{"uploadId": {u.id}}, nil, nil))
}
