package shards

import (
	"encoding/binary"
	"encoding/json"
	"path/filepath"
	"reflect"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

const formatPage = "../docs/formats/shard.md"

// The offsets in the box drawing of the format page equal the offsets of a written shard.
func TestFormatPageOffsets(t *testing.T) {
	page := string(readFile(t, formatPage))
	box := regexp.MustCompile(`(?m)^byte 0 +(\d+) +(\d+) +(\d+) +(\d+) +(\d+)$`).FindStringSubmatch(page)
	if box == nil {
		t.Fatal("the page has no box drawing of x.idx")
	}
	var at [6]int
	for i, s := range box[1:] {
		at[i+1], _ = strconv.Atoi(s)
	}
	prefix := filepath.Join(t.TempDir(), "x")
	const documents = 9
	if err := write(prefix, 1, documents); err != nil {
		t.Fatal(err)
	}
	idx, le := readFile(t, prefix+".idx"), binary.LittleEndian
	if string(idx[:at[1]]) != "MMIDIDX\x00\x00" || le.Uint64(idx[at[1]:]) != 1 || at[2]-at[1] != 8 ||
		DTypeOf(idx[at[2]]) != UInt16 || at[3]-at[2] != 1 ||
		le.Uint64(idx[at[3]:]) != documents || le.Uint64(idx[at[4]:]) != documents+1 || at[5]-at[4] != 8 {
		t.Errorf("the header is %x, not as the page has it at %v", idx[:40], at)
	}
	lengths, starts, ends := idx[at[5]:], idx[at[5]+4*documents:], idx[at[5]+12*documents:]
	for d := range documents { // document d has d tokens
		if le.Uint32(lengths[4*d:]) != uint32(d) || le.Uint64(starts[8*d:]) != uint64(2*d*(d-1)/2) ||
			le.Uint64(ends[8*d:]) != uint64(d) {
			t.Errorf("document %d is not where the page says", d)
		}
	}
	if want := at[5] + 12*documents + 8*(documents+1); len(idx) != want || !strings.Contains(page, "34+12ns+8nd") {
		t.Errorf("x.idx has %d bytes, by the page %d", len(idx), want)
	}
}

// The manifest on the format page has the fields of Manifest, neither more nor fewer.
func TestFormatPageManifest(t *testing.T) {
	page := string(readFile(t, formatPage))
	_, sample, _ := strings.Cut(page, "```json\n")
	sample, _, _ = strings.Cut(sample, "```")
	var m Manifest
	d := json.NewDecoder(strings.NewReader(sample))
	d.DisallowUnknownFields()
	if err := d.Decode(&m); err != nil {
		t.Fatalf("the sample on the page: %v", err)
	}
	again, err := json.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	var onPage, inCode any
	if err := json.Unmarshal([]byte(sample), &onPage); err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(again, &inCode); err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(onPage, inCode) {
		t.Errorf("the page has %v, the code %v", onPage, inCode)
	}
	if len(m.Files) != len(manifestFiles) || m.Format != manifestFormat {
		t.Errorf("format %d and files %v", m.Format, m.Files)
	}
}
