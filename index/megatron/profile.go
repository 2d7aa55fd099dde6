package megatron

import (
	"fmt"
	"slices"
	"strings"

	"mula/index/gpt"
	"mula/index/rebuild"
)

// A Profile is a group of releases of Megatron core that write the same names and bytes. The zero
// value is invalid; use [ProfileNamed].
type Profile struct {
	name   string // of the group's first release
	tags   string // all releases of the group, for people
	others string // the names of the other releases, separated by blanks

	pathPrefix bool // core 0.4: key path_prefix, no split_matrix, no tokenizer, bounds by rounded widths
	// no split in file names or in the blend's description; only weighted blends and given sizes;
	// no options
	bareNames    bool
	renormalize  bool // key renormalize_blend_weights at the end of a blend's description, and the option
	oneCeil      bool // N = ceil(N*w*1.005), and the blend as long as the sum
	fixedSurplus bool // the surplus cannot be configured
	positive     bool // weights must be above 0; in 0.4 because sample counts must be
	checkOffsets bool // an int32 sample index that ends with offset -1 is rejected
	sampleType   gpt.SampleType
}

// profiles lists the releases of Megatron core at which index files changed: the table "Releases"
// of docs/formats/index-files.md.
var profiles = [...]Profile{
	{name: "core-0.4", tags: "0.4", pathPrefix: true, bareNames: true, oneCeil: true, fixedSurplus: true,
		positive: true, sampleType: gpt.Int32},
	{name: "core-0.5", tags: "0.5 and 0.6", others: "core-0.6", bareNames: true, oneCeil: true, fixedSurplus: true,
		sampleType: gpt.Int32},
	{name: "core-0.7", tags: "0.7", oneCeil: true, fixedSurplus: true, positive: true, sampleType: gpt.Int32},
	{name: "core-0.8", tags: "0.8", oneCeil: true, fixedSurplus: true, positive: true, sampleType: gpt.Int64},
	{name: "core-0.9", tags: "0.9", renormalize: true, oneCeil: true, fixedSurplus: true, positive: true,
		sampleType: gpt.Int64},
	{name: "core-0.10", tags: "0.10", renormalize: true, oneCeil: true, fixedSurplus: true, positive: true,
		checkOffsets: true, sampleType: gpt.Auto},
	{name: "core-0.11", tags: "0.11 and 0.12", others: "core-0.12", fixedSurplus: true, positive: true,
		checkOffsets: true, sampleType: gpt.Auto},
	{name: "core-0.13", tags: "0.13 and newer",
		others:   "core-0.14 core-0.15 core-0.16 core-0.17 core-0.18 core-0.19 core-main",
		positive: true, checkOffsets: true, sampleType: gpt.Auto},
}

// Profiles returns all profiles, oldest first.
func Profiles() []Profile { return append([]Profile(nil), profiles[:]...) }

// names lists the names of the profile's releases.
func (p Profile) names() []string { return append([]string{p.name}, strings.Fields(p.others)...) }

// ProfileNames lists the names that [ProfileNamed] accepts, the oldest release first.
func ProfileNames() (names []string) {
	for _, p := range profiles {
		names = append(names, p.names()...)
	}
	return names
}

// ProfileNamed returns the profile of a release, "core-0.4" to "core-0.19", or "core-main" for
// Megatron's main branch.
func ProfileNamed(name string) (Profile, error) {
	for _, p := range profiles {
		if slices.Contains(p.names(), name) {
			return p, nil
		}
	}
	return Profile{}, fmt.Errorf("unknown profile %q; give the release of megatron-core that will read the cache, "+
		"one of %s", name, strings.Join(ProfileNames(), ", "))
}

// Name returns the name of the profile's first release.
func (p Profile) Name() string { return p.name }

// Releases describes the releases of Megatron core in the profile, for people.
func (p Profile) Releases() string { return p.tags }

// String returns the profile's name.
func (p Profile) String() string { return p.name }

// gptName returns the prefix of the file names of a GPT dataset.
func (p Profile) gptName(hash string, s rebuild.Split) string { return p.fileName(hash, gptClass, s) }

// blendName returns the prefix of the file names of a blend.
func (p Profile) blendName(hash string, s rebuild.Split) string {
	return p.fileName(hash, blendClass, s)
}

func (p Profile) fileName(hash, class string, s rebuild.Split) string {
	if p.bareNames {
		return hash + "-" + class + "-"
	}
	return hash + "-" + class + "-" + s.String() + "-"
}

// The classes, and the suffixes of their file names.
const (
	gptClass   = rebuild.DatasetClass
	blendClass = "BlendedDataset"

	descriptionEnd = "description.txt"
)

var (
	gptEnds   = [...]string{"document_index.npy", "sample_index.npy", "shuffle_index.npy"}
	blendEnds = [...]string{"dataset_index.npy", "dataset_sample_index.npy"}
)
