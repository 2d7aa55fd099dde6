package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"
)

// packTar returns a tar archive of the files in the order of their names, with one time and owner.
// A name with a final slash is a folder.
func packTar(files []file, at time.Time) ([]byte, error) {
	files = slices.SortedFunc(slices.Values(files), byName)
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, f := range files {
		h := &tar.Header{Name: f.name, Mode: f.mode, Size: int64(len(f.data)), ModTime: at, Typeflag: tar.TypeReg,
			Format: tar.FormatUSTAR}
		if strings.HasSuffix(f.name, "/") {
			h.Typeflag = tar.TypeDir
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, fmt.Errorf("%s: %w", f.name, err)
		}
		if _, err := w.Write(f.data); err != nil {
			return nil, fmt.Errorf("%s: %w", f.name, err)
		}
	}
	err := w.Close()
	return out.Bytes(), err
}

// compress returns gzip data without a name or time in its header.
func compress(data []byte) ([]byte, error) {
	var out bytes.Buffer
	w, err := gzip.NewWriterLevel(&out, gzip.BestCompression)
	if err != nil {
		return nil, err
	}
	if _, err := w.Write(data); err != nil {
		return nil, err
	}
	err = w.Close()
	return out.Bytes(), err
}

// archive returns the .tar.gz for a platform.
func (b *build) archive(p platform) (file, error) {
	program, err := os.ReadFile(b.binary(p, false))
	if err != nil {
		return file{}, err
	}
	licenses, err := b.thirdParty(p, false)
	if err != nil {
		return file{}, err
	}
	folder := fmt.Sprintf("mula_%s_%s", b.version.semver, p)
	files := []file{{"mula", 0o755, program}, {"LICENSE", 0o644, b.license}, licenses, {"README.md", 0o644, b.readme},
		{"CHANGELOG.md", 0o644, b.changelog}}
	for _, f := range b.man {
		files = append(files, file{"man/" + f.name, f.mode, f.data})
	}
	for _, f := range b.completions {
		files = append(files, file{"completions/" + f.name, f.mode, f.data})
	}
	for i := range files {
		files[i].name = folder + "/" + files[i].name
	}
	data, err := packTar(files, b.time)
	if err != nil {
		return file{}, err
	}
	data, err = compress(data)
	return file{folder + ".tar.gz", 0o644, data}, err
}

// sums returns the file SHA256SUMS, in the format of sha256sum.
func sums(files []file) file {
	var out strings.Builder
	for _, f := range files {
		fmt.Fprintf(&out, "%x  %s\n", sha256.Sum256(f.data), f.name)
	}
	return file{"SHA256SUMS", 0o644, []byte(out.String())}
}
