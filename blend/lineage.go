package blend

import (
	"errors"
	"fmt"
	"sort"
	"unicode"

	"mula/index"
)

// Limits of the number of amendments, and of a reason in bytes.
const (
	maxParents = 4096
	maxReason  = 1000
)

// window returns the window number of the source's training window t.
func (s *Source) window(t int64) int64 {
	if s.parts == nil {
		return t
	}
	p := &s.parts[sort.Search(len(s.parts)-1, func(j int) bool { return s.parts[j+1].training > t })]
	return p.window + t - p.training
}

// trainingWindow is the inverse of window. ok is false for validation windows and for numbers out
// of range.
func (s *Source) trainingWindow(window int64) (t int64, ok bool) {
	if s.parts == nil {
		return window, window >= 0 && window < s.training
	}
	p := &s.parts[sort.Search(len(s.parts)-1, func(j int) bool { return s.parts[j+1].window > window })]
	i := window - p.window
	return p.training + i, i >= 0 && i < p.count
}

// validationWindows lists the validation windows.
func (s *Source) validationWindows() []Range {
	if s.parts == nil {
		return []Range{{s.training, s.Windows()}}
	}
	var list []Range
	for i, p := range s.parts {
		end := s.Windows()
		if i+1 < len(s.parts) {
			end = s.parts[i+1].window
		}
		list = append(list, Range{p.window + p.count, end})
	}
	return list
}

// partOf returns the number of the part that has a window, and the window's number in the part.
func (s *Source) partOf(window int64) (part int, number int64) {
	if s.parts == nil {
		return 0, window
	}
	part = sort.Search(len(s.parts)-1, func(j int) bool { return s.parts[j+1].window > window })
	return part, window - s.parts[part].window
}

// partOfShard returns the number of the part that has a shard, and the part's first window.
func (s *Source) partOfShard(shard int) (part int, window int64) {
	if s.parts == nil {
		return 0, 0
	}
	part = sort.Search(len(s.parts)-1, func(j int) bool { return s.parts[j+1].shard > shard })
	return part, s.parts[part].window
}

// partShards returns the range [first, end) of a part's shards.
func (s *Source) partShards(part int) (first, end int) {
	if s.parts == nil {
		return 0, len(s.Shards)
	}
	end = len(s.Shards)
	if part+1 < len(s.parts) {
		end = s.parts[part+1].shard
	}
	return s.parts[part].shard, end
}

// shardsByPart returns the number of shards of each part.
func (s *Source) shardsByPart() ([]int, error) {
	if len(s.Growth) > maxParents {
		return nil, fmt.Errorf("the source has grown %d times; the limit is %d", len(s.Growth), maxParents)
	}
	list := make([]int, 1, len(s.Growth)+1)
	left := len(s.Shards)
	for i, g := range s.Growth {
		if g.Shards < 1 || g.Shards >= left {
			return nil, fmt.Errorf("growth %d has %d shards, but only %d shards remain", i+1, g.Shards, left)
		}
		left -= g.Shards
		list = append(list, g.Shards)
	}
	list[0] = left
	return list, nil
}

// compileGrowth prepares the order of a source that has grown, given the shards and windows of each
// part.
func (s *Source) compileGrowth(seed uint64, l index.Locality, shards []int, windows []int64) error {
	held := s.Validation
	for i, g := range s.Growth {
		if g.Validation < 0 || g.Validation > held || g.Sample > maxLength {
			return fmt.Errorf("growth %d is invalid: %d validation windows at sample %d", i+1, g.Validation, g.Sample)
		}
		held -= g.Validation
	}
	// held now describes the first part.
	s.parts = nil
	var next part
	add := func(held int64) (int64, error) {
		p := next
		i := len(s.parts)
		if p.count = windows[i] - held; p.count < 0 {
			return 0, fmt.Errorf("%d of %d windows are validation windows", held, windows[i])
		}
		next.shard += shards[i]
		next.window += windows[i]
		next.training += p.count
		s.parts = append(s.parts, p)
		return p.count, nil
	}
	first, err := add(held)
	if err != nil {
		return err
	}
	if first == 0 {
		return errors.New("the source had no training windows before it grew")
	}
	var growths []index.Growth
	for i, g := range s.Growth {
		fresh, err := add(g.Validation)
		if err != nil {
			return fmt.Errorf("growth %d: %w", i+1, err)
		}
		growths = append(growths, index.Growth{Sample: g.Sample, Windows: fresh})
	}
	s.order, err = index.NewGrowingOrder(seed, s.Name, first, growths, l)
	return err
}

// checkParents validates the parents.
func (p *Plan) checkParents() error {
	if len(p.Parents) > maxParents {
		return fmt.Errorf("the plan has %d parents; the limit is %d", len(p.Parents), maxParents)
	}
	for i, from := range p.Parents {
		if !isHex(from.Fingerprint, 64) || from.At < 0 || from.At > maxLength {
			return fmt.Errorf("parent %d is invalid: plan %.64q, amended at position %d", i+1, from.Fingerprint,
				from.At)
		}
		if err := validateReason(from.Reason); err != nil {
			return fmt.Errorf("parent %d: %w", i+1, err)
		}
	}
	if len(p.Parents) == 0 {
		for _, s := range p.Sources {
			if len(s.Growth) > 0 {
				return fmt.Errorf("source %q has grown, but the plan has no parent", s.Name)
			}
		}
	}
	return nil
}

// validateReason refuses texts that the canonical form of a plan cannot hold without escapes.
func validateReason(reason string) error {
	if reason == "" {
		return nil
	}
	if len(reason) > maxReason {
		return fmt.Errorf("the reason has %d bytes; the limit is %d", len(reason), maxReason)
	}
	if !isPlainText(reason) {
		return fmt.Errorf("the reason %.80q contains a quotation mark, backslash or control character, or is not UTF-8",
			reason)
	}
	return nil
}

// validateNewReason validates the reason of a new amendment. It also refuses invisible characters,
// so that readers see the whole text. Existing plans with such a reason stay readable.
func validateNewReason(reason string) error {
	if err := validateReason(reason); err != nil {
		return err
	}
	for _, r := range reason {
		if unicode.In(r, unicode.Cc, unicode.Cf) {
			return fmt.Errorf("the reason %.80q contains the invisible character U+%04X; remove it", reason, r)
		}
	}
	return nil
}

// OrderVersion returns the version of the plan's order as in plan.json: "1", "2" for a plan that
// amends another, [BlocksOrder], [BlocksAmendedOrder], [MegatronOrder], [PackedOrder] or
// [PackedAmendedOrder].
func (p *Plan) OrderVersion() string { return p.order.traits().Version }

// Shared returns the number of leading positions whose samples are the same in the plan with the
// given fingerprint. For the plan's own fingerprint, and for the fingerprint that it had before it
// was completed, these are all positions. For a parent, they are the positions before every
// amendment since. ok is false for other plans.
func (p *Plan) Shared(fingerprint string) (positions int64, ok bool) {
	positions = p.length
	if p.Has(fingerprint) {
		return positions, true
	}
	for i := len(p.Parents) - 1; i >= 0; i-- {
		positions = min(positions, p.Parents[i].At)
		if p.Parents[i].Fingerprint == fingerprint {
			return positions, true
		}
	}
	return 0, false
}
