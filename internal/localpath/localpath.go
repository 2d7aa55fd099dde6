// Package localpath rejects URLs where mula expects paths. mula reads and writes files of the local
// file system only. Without the check, a URL would become a folder "s3:" in the working directory.
package localpath

import (
	"fmt"
	"regexp"
	"strings"
)

// url matches the scheme of a URL. Libraries that clean paths leave one slash of the two:
// "s3:/bucket".
var url = regexp.MustCompile(`^([A-Za-z][A-Za-z0-9+.-]+://|(?i:s3|s3a|gs|gcs|az|abfs|abfss|adl|hf|hdfs|https?|ftp|file|oci|swift|wasbs?):/)`)

// readers are the commands that print the content of a URL, by scheme.
var readers = map[string]string{
	"s3": "aws s3 cp %s -", "gs": "gcloud storage cat %s", "http": "curl -sSfL %s", "https": "curl -sSfL %s",
	"hdfs": "hdfs dfs -cat %s",
}

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
	return fmt.Errorf("%s is a URL, and mula reads and writes local files only; mount the store as a file system or "+
		"copy the files (a folder of that name is ./%s)",
		path, path)
}

// Pipe returns a shell command that pipes the documents at a URL to mula tokenize, or "" for a URL
// with another scheme.
func Pipe(url string) string {
	scheme, _, _ := strings.Cut(url, ":")
	if reader, ok := readers[strings.ToLower(scheme)]; ok {
		return fmt.Sprintf(reader+" | mula tokenize … -", url)
	}
	return ""
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
