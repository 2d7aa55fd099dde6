package blend

import "fmt"

// A Cursor is the state of a loader: the plan and the next position.
type Cursor struct {
	Plan     string `json:"plan"`     // fingerprint
	Position int64  `json:"position"` // of the next sample
}

// Check verifies that a run at the cursor can resume with p: the samples before the cursor must be
// the same in p. p is the cursor's own plan, or a plan that amends it at the cursor's position or
// later.
func (c Cursor) Check(p *Plan) error {
	shared, ok := p.Shared(c.Plan)
	switch {
	case !ok:
		return fmt.Errorf("the cursor belongs to plan %.16s…, not to plan %.16s…; use the plan that the run started "+
			"with", c.Plan, p.fingerprint)
	case c.Position < 0 || c.Position > p.length:
		return fmt.Errorf("the cursor is at position %d, but the plan has %d positions", c.Position, p.length)
	case c.Position > shared:
		return fmt.Errorf("the cursor is at position %d of plan %.16s…, which plan %.16s… amends from position %d"+
			": the run has already read samples that the amended plan replaces; "+
			"use the plan that the run started with, or amend it at position %d or later", c.Position, c.Plan,
			p.fingerprint, shared, c.Position)
	}
	return nil
}
