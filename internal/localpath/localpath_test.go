package localpath

import (
	"strings"
	"testing"
)

func TestCheck(t *testing.T) {
	for _, path := range []string{"", "-", "a/b", "/a/b", "./s3://b", "a:b", "C:/x", "s3", "s3:", "s3:b", "x:/y",
		"://a", "a b://c", "3s://b", "dir/s3://b", "opencl:x#2", "127.0.0.1:80"} {
		if err := Check(path); err != nil {
			t.Errorf("%q: %v", path, err)
		}
	}
	for path, says := range map[string]string{
		"s3://b/x": "mount the store", "S3://b/x": "copy the files", "s3:/b/x": "mount the store",
		"https://h/x": "copy the files", "hf://datasets/x": "copy the files", "unknown+x.y-1://z": "must be local",
		"file:///a/b": "write /a/b", "file:/a": "write /a",
	} {
		if err := Check(path); err == nil || !strings.Contains(err.Error(), says) ||
			!strings.HasPrefix(err.Error(), path+" is a URL") {
			t.Errorf("%q: %v, want %q", path, err, says)
		}
	}
	for text, bad := range map[string]bool{"0.5 a/b 0.5 c": false, "0.5 a/b 0.5 s3://c": true, "a,s3://c": true,
		"x=gs://c": true, "s3:/b c": true} {
		if err := CheckWords(text); (err != nil) != bad {
			t.Errorf("%q: %v", text, err)
		}
	}
}
