package objectstest

import (
	"net/http/httptest"
	"testing"

	"github.com/johannesboyne/gofakes3"
	"github.com/johannesboyne/gofakes3/backend/s3mem"
)

// bucket is the bucket of the stores of this package.
const bucket = "bucket"

// S3 starts a server in memory with the interface of S3, behind a proxy, and sets the environment
// to it. Both end with the test. The server does not check signatures.
func S3(t *testing.T) Place {
	backend := s3mem.New()
	if err := backend.CreateBucket(bucket); err != nil {
		t.Fatal(err)
	}
	server := httptest.NewServer(gofakes3.New(backend, gofakes3.WithHostBucket(false)).Server())
	t.Cleanup(server.Close)
	proxy := NewProxy(t, server.URL)
	setS3(t, proxy.URL)
	return Place{URL: "s3://" + bucket + "/", Proxy: proxy, List: true, Secrets: []string{"hidden-secret"}}
}

// setS3 sets the environment to a server until the test ends.
func setS3(t testing.TB, endpoint string) {
	for name, value := range map[string]string{"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "test",
		"AWS_SECRET_ACCESS_KEY": "hidden-secret", "AWS_REGION": "us-east-1", "AWS_ENDPOINT_URL_S3": "",
		"AWS_PROFILE": ""} {
		t.Setenv(name, value)
	}
}
