package main

import (
	"bytes"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// images returns the image of all Linux platforms as an OCI layout in a tar archive, and one archive
// for `docker load` a platform.
func (b *build) images() ([]file, error) {
	index := mutate.IndexMediaType(empty.Index, types.OCIImageIndex)
	var out []file
	for _, p := range platforms {
		if p.os != "linux" {
			continue
		}
		image, err := b.image(p)
		if err != nil {
			return nil, err
		}
		index = mutate.AppendManifests(index, mutate.IndexAddendum{Add: image,
			Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: p.os, Architecture: p.arch}}})
		var archive bytes.Buffer
		tag, err := name.NewTag("mula:" + b.version.tag)
		if err != nil {
			return nil, err
		}
		if err := tarball.Write(tag, image, &archive); err != nil {
			return nil, err
		}
		out = append(out, file{fmt.Sprintf("mula_%s_docker_%s.tar", b.version.semver, p.arch), 0o644, archive.Bytes()})
	}
	index = mutate.Annotations(index, b.labels()).(v1.ImageIndex)
	dir := filepath.Join(b.staging, "oci")
	store, err := layout.Write(dir, empty.Index)
	if err != nil {
		return nil, err
	}
	if err := store.AppendIndex(index, layout.WithAnnotations(
		map[string]string{"org.opencontainers.image.ref.name": b.version.tag})); err != nil {
		return nil, err
	}
	members, err := readTree(dir)
	if err != nil {
		return nil, err
	}
	data, err := packTar(members, b.time)
	return append(out, file{fmt.Sprintf("mula_%s_oci.tar", b.version.semver), 0o644, data}), err
}

// labels describe the image.
func (b *build) labels() map[string]string {
	const prefix = "org.opencontainers.image."
	out := map[string]string{prefix + "title": "mula", prefix + "description": summary,
		prefix + "licenses": "Apache-2.0", prefix + "version": b.version.semver, prefix + "revision": b.commit,
		prefix + "created": b.time.Format(time.RFC3339)}
	if b.maintainer != "" {
		out[prefix+"authors"] = b.maintainer
	}
	if b.homepage != "" {
		out[prefix+"url"] = b.homepage
	}
	return out
}

// image returns the image of one platform: the static program, its licences, an empty /tmp, and a user.
func (b *build) image(p platform) (v1.Image, error) {
	program, err := os.ReadFile(b.binary(p, true))
	if err != nil {
		return nil, err
	}
	licenses, err := b.thirdParty(p, true)
	if err != nil {
		return nil, err
	}
	data, err := packTar([]file{{"etc/", 0o755, nil}, {"usr/", 0o755, nil}, {"usr/bin/", 0o755, nil},
		{"usr/share/", 0o755, nil}, {"usr/share/doc/", 0o755, nil}, {"usr/share/doc/mula/", 0o755, nil},
		{"usr/share/doc/mula/LICENSE", 0o644, b.license},
		{"usr/share/doc/mula/" + licenses.name, 0o644, licenses.data},
		{"etc/passwd", 0o644, []byte("root:x:0:0:root:/:/sbin/nologin\nmula:x:65532:65532:mula:/work:/sbin/nologin\n")},
		{"etc/group", 0o644, []byte("root:x:0:\nmula:x:65532:\n")},
		{"tmp/", 0o1777, nil}, {"work/", 0o1777, nil}, {"usr/bin/mula", 0o755, program}}, b.time)
	if err != nil {
		return nil, err
	}
	if data, err = compress(data); err != nil {
		return nil, err
	}
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(data)), nil
	}, tarball.WithMediaType(types.OCILayer))
	if err != nil {
		return nil, err
	}
	base := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	image, err := mutate.Append(base, mutate.Addendum{Layer: layer, MediaType: types.OCILayer,
		History: v1.History{CreatedBy: "mula tools/dist", Created: v1.Time{Time: b.time}}})
	if err != nil {
		return nil, err
	}
	config, err := image.ConfigFile()
	if err != nil {
		return nil, err
	}
	config = config.DeepCopy()
	config.OS, config.Architecture, config.Created = p.os, p.arch, v1.Time{Time: b.time}
	config.Config = v1.Config{Entrypoint: []string{"/usr/bin/mula"}, User: "65532:65532", WorkingDir: "/work",
		Env: []string{"PATH=/usr/bin", "HOME=/tmp"}, Labels: b.labels()}
	return mutate.ConfigFile(image, config)
}

// readTree reads all files in a folder.
func readTree(dir string) ([]file, error) {
	var out []file
	err := filepath.WalkDir(dir, func(name string, entry fs.DirEntry, err error) error {
		if err != nil || entry.IsDir() {
			return err
		}
		data, err := os.ReadFile(name)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, name)
		out = append(out, file{filepath.ToSlash(rel), 0o644, data})
		return err
	})
	return out, err
}
