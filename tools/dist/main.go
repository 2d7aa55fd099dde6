// Command dist builds the release files of mula in a folder: archives, Python wheels, .deb and .rpm
// packages, a container image, an SBOM and checksums. Equal commits give equal bytes.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
)

// A platform is a target of the go command.
type platform struct{ os, arch string }

func (p platform) String() string { return p.os + "_" + p.arch }

var platforms = []platform{{"linux", "amd64"}, {"linux", "arm64"}, {"darwin", "arm64"}}

func main() {
	output := flag.String("output", "dist", "write the files to `FOLDER`; release files already there are removed")
	allowDirty := flag.Bool("allow-dirty", false, "build although files differ from the commit")
	root := flag.String("root", "..", "read the sources from `FOLDER`")
	maintainer := flag.String("maintainer", "", "name the maintainer of the packages, as `\"NAME <ADDRESS>\"`")
	homepage := flag.String("homepage", "", "name the home page of mula in the packages, a `URL`")
	flag.Parse()
	who, err := newContact(*maintainer, *homepage)
	if err == nil {
		err = run(*root, *output, *allowDirty, who)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "dist:", err)
		os.Exit(1)
	}
}

func run(root, output string, allowDirty bool, who contact) error {
	root, err := filepath.Abs(root)
	if err != nil {
		return err
	}
	if flag.NArg() > 0 {
		return fmt.Errorf("unexpected operand %q; see -help", flag.Arg(0))
	}
	src, err := readSource(root)
	if err != nil {
		return err
	}
	if src.dirty && !allowDirty {
		return errors.New("files differ from the commit; commit them, or run make dist ARGS=-allow-dirty")
	}
	staging, err := os.MkdirTemp("", "mula-dist-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(staging)
	b := &build{source: src, contact: who, staging: staging}
	if err := b.compile(); err != nil {
		return err
	}
	if err := b.documents(); err != nil {
		return err
	}
	release, err := b.release()
	if err != nil {
		return err
	}
	return publish(output, src.version, release)
}

// A file is one release file, or one member of an archive.
type file struct {
	name string
	mode int64
	data []byte
}

// release returns all release files but the checksums.
func (b *build) release() ([]file, error) {
	var out []file
	for _, p := range platforms {
		archive, err := b.archive(p)
		if err != nil {
			return nil, err
		}
		wheel, err := b.wheel(p)
		if err != nil {
			return nil, err
		}
		bom, err := b.sbom(p)
		if err != nil {
			return nil, err
		}
		out = append(out, archive, wheel, bom)
		if p.os != "linux" {
			continue
		}
		for _, format := range []string{"deb", "rpm"} {
			pkg, err := b.linuxPackage(p, format)
			if err != nil {
				return nil, fmt.Errorf("%s for %s: %w", format, p, err)
			}
			out = append(out, pkg)
		}
	}
	images, err := b.images()
	if err != nil {
		return nil, fmt.Errorf("image: %w", err)
	}
	out = append(out, images...)
	slices.SortFunc(out, byName)
	return append(out, sums(out)), nil
}

// patterns match every release file of any version, so that a folder has files of one version only.
var patterns = []string{"mula_*.tar.gz", "mula_data-*.whl", "mula_*.deb", "mula-*.rpm", "mula_*.cdx.json",
	"mula_*_oci.tar", "mula_*_docker_*.tar", "SHA256SUMS"}

// publish replaces the release files in a folder.
func publish(output string, v version, release []file) error {
	if err := os.MkdirAll(output, 0o777); err != nil {
		return err
	}
	for _, pattern := range patterns {
		old, err := filepath.Glob(filepath.Join(output, pattern))
		if err != nil {
			return err
		}
		for _, name := range old {
			if err := os.Remove(name); err != nil {
				return err
			}
		}
	}
	for _, f := range release {
		if err := os.WriteFile(filepath.Join(output, f.name), f.data, 0o666); err != nil {
			return err
		}
	}
	fmt.Printf("%s: %d files of version %s\n", output, len(release), v.semver)
	return nil
}
