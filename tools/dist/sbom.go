package main

import (
	"bytes"
	"crypto/sha256"
	"debug/buildinfo"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/CycloneDX/cyclonedx-go"
)

// sbom returns the list of the modules that the go command recorded in a program. Hashes are the
// sums of go.sum (h1, SHA-256 of a list of hashes of files). Licences are not recorded.
func (b *build) sbom(p platform) (file, error) {
	program, err := os.ReadFile(b.binary(p, false))
	if err != nil {
		return file{}, err
	}
	info, err := buildinfo.Read(bytes.NewReader(program))
	if err != nil {
		return file{}, fmt.Errorf("%s: %w", b.binary(p, false), err)
	}
	bom := cyclonedx.NewBOM()
	sum := sha256.Sum256(program)
	root := cyclonedx.Component{BOMRef: "mula", Type: cyclonedx.ComponentTypeApplication, Name: "mula",
		Version:  b.version.semver,
		Hashes:   &[]cyclonedx.Hash{{Algorithm: cyclonedx.HashAlgoSHA256, Value: hex.EncodeToString(sum[:])}},
		Licenses: &cyclonedx.Licenses{{License: &cyclonedx.License{ID: "Apache-2.0"}}}}
	bom.Metadata = &cyclonedx.Metadata{Timestamp: b.time.Format(time.RFC3339), Component: &root}
	std := "pkg:golang/std@" + strings.TrimPrefix(info.GoVersion, "go")
	components := []cyclonedx.Component{{BOMRef: std, Type: cyclonedx.ComponentTypeLibrary, Name: "std",
		Version: info.GoVersion, PackageURL: std}}
	refs := []string{std}
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		url := "pkg:golang/" + m.Path + "@" + m.Version
		c := cyclonedx.Component{BOMRef: url, Type: cyclonedx.ComponentTypeLibrary, Name: m.Path, Version: m.Version,
			PackageURL: url}
		if text, ok := strings.CutPrefix(m.Sum, "h1:"); ok {
			hash, err := base64.StdEncoding.DecodeString(text)
			if err != nil {
				return file{}, fmt.Errorf("sum of module %s: %w", m.Path, err)
			}
			c.Hashes = &[]cyclonedx.Hash{{Algorithm: cyclonedx.HashAlgoSHA256, Value: hex.EncodeToString(hash)}}
		}
		components, refs = append(components, c), append(refs, url)
	}
	bom.Components = &components
	bom.Dependencies = &[]cyclonedx.Dependency{{Ref: "mula", Dependencies: &refs}}
	var out bytes.Buffer
	encoder := cyclonedx.NewBOMEncoder(&out, cyclonedx.BOMFileFormatJSON).SetPretty(true)
	if err := encoder.Encode(bom); err != nil {
		return file{}, err
	}
	return file{fmt.Sprintf("mula_%s_%s.cdx.json", b.version.semver, p), 0o644, out.Bytes()}, nil
}
