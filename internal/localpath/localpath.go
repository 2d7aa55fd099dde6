// Package localpath rejects URLs where mula expects paths of the local file system. Without the
// check, a URL would become a folder "s3:" in the working directory.
package localpath

import (
	"fmt"
	"regexp"
	"strings"
)

// url matches the scheme of a URL. Libraries that clean paths leave one slash of the two:
// "s3:/bucket".
var url = regexp.MustCompile(`^([A-Za-z][A-Za-z0-9+.-]+://|(?i:s3|s3a|gs|gcs|az|abfs|abfss|adl|hf|hdfs|https?|ftp|file|oci|swift|wasbs?):/)`)

// Check returns an error if path is a URL. The error suggests what to do.
func Check(path string) error {
	if !url.MatchString(path) {
		return nil
	}
	scheme, rest, _ := strings.Cut(path, ":")
	scheme = strings.ToLower(scheme)
	if scheme == "file" {
		return fmt.Errorf("%s is a URL, and mula takes paths; write /%s", path, strings.TrimLeft(rest, "/"))
	}
	return fmt.Errorf("%s is a URL, and this path must be local; mount the store as a file system or copy the files "+
		"(a folder of that name is ./%s)", path, path)
}

// CheckWords checks every word of text, which may contain several paths separated by white space,
// commas or equals signs.
func CheckWords(text string) error {
	if err := Check(text); err != nil {
		return err
	}
	for _, word := range strings.FieldsFunc(text, func(r rune) bool { return strings.ContainsRune(" \t\r\n,=", r) }) {
		if err := Check(word); err != nil {
			return err
		}
	}
	return nil
}
