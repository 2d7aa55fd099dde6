package blend

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"

	"mula/internal/objects"
	"mula/internal/strictjson"
)

// ReadPlan reads a plan.json and verifies everything that does not need the shards: its structure,
// its fingerprint, and that the order still yields the (source, window) pairs of its check values.
// The path may be a URL.
func ReadPlan(path string) (*Plan, error) {
	data, err := readPlanFile(path)
	if err != nil {
		return nil, err
	}
	p, err := parsePlan(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	p.file, p.base = path, realDir(objects.Dir(path))
	p.order.resolve()
	return p, nil
}

func readPlanFile(path string) ([]byte, error) {
	if objects.IsURL(path) {
		data, _, err := objects.ReadFile(context.Background(), path, maxPlanFile+1)
		return data, err
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxPlanFile+1))
	if err != nil {
		return nil, fmt.Errorf("reading %s: %w", path, err)
	}
	return data, nil
}

func parsePlan(data []byte) (*Plan, error) {
	if len(data) > maxPlanFile {
		return nil, fmt.Errorf("the file has more than %d bytes, so it is not a plan", maxPlanFile)
	}
	// Versions are checked first; otherwise another version would be reported as a damaged file.
	var versions struct {
		Format      *int   `json:"format"`
		Provisional string `json:"provisional"`
		Plan        struct {
			Order json.RawMessage `json:"order"`
		} `json:"plan"`
		Written struct {
			Sources []writtenSamples `json:"sources"`
		} `json:"written"`
	}
	if text := bytes.TrimLeft(data, " \t\r\n"); len(text) > 0 && text[0] != '{' && text[0] != '[' {
		return nil, errors.New("this is not a plan.json, because it is not JSON; to build a plan, run `mula blend`")
	}
	if err := strictjson.DecodeLoosely(data, &versions); err != nil {
		return nil, err
	}
	switch {
	case versions.Format == nil:
		return nil, errors.New("this is not a plan, because it has no format version; to build a plan, run " +
			"`mula blend`")
	case *versions.Format != planFormat && *versions.Format != sampledFormat:
		return nil, fmt.Errorf("format version %d is not supported; this program reads versions %d and %d",
			*versions.Format, planFormat, sampledFormat)
	case versions.Plan.Order == nil:
		return nil, errors.New("the plan has no order version")
	}
	p, fingerprint, err := parseOrder(string(versions.Plan.Order), data)
	if err != nil {
		return nil, err
	}
	if err := p.takeSamples(versions.Written.Sources); err != nil {
		return nil, err
	}
	if p.format() > *versions.Format {
		return nil, fmt.Errorf("a plan of format version %d has no samples of shards", *versions.Format)
	}
	if err := p.compile(); err != nil {
		return nil, err
	}
	if err := p.seal(); err != nil {
		return nil, err
	}
	if p.fingerprint != fingerprint {
		return nil, fmt.Errorf("the plan was changed after it was built: its fingerprint is %s, not %.64q; restore "+
			"it, or build a new plan", p.fingerprint, fingerprint)
	}
	if want := p.provisional; versions.Provisional != want && (versions.Provisional != "" || !p.Provisional()) {
		return nil, fmt.Errorf("the samples of its shards were changed: with them, its provisional fingerprint is %s, "+
			"not %.64q; restore it, or build a new plan", want, versions.Provisional)
	}
	if !p.Traits().Scheduled { // the pairs can be verified only with an open cache
		return p, p.verifyPositions()
	}
	return p, p.verifyPairs()
}
