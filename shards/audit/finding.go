package audit

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"mula/internal/quantity"
	"mula/shards/formats"
)

// A Level says how much a finding matters.
type Level string

// The levels.
const (
	Error   Level = "error"   // the data are not what they should be
	Warning Level = "warning" // they are probably not what was meant
	Note    Level = "note"    // good to know
)

// A Finding is something to look at.
type Finding struct {
	Level    Level  `json:"level"`
	Kind     string `json:"kind"` // hash, structure, dtype, separator, vocabulary, documents, copy, tail, repeats
	Source   string `json:"source"`
	Path     string `json:"path"`
	Document int64  `json:"document"` // its number, -1 where it is about no single one
	Byte     int64  `json:"byte"`     // in the file of ids, -1 where it is about no place
	Message  string `json:"message"`  // what is wrong and what to do
}

// judge adds the findings that follow from what was counted in a shard.
func (s *scan) judge(o *Options) {
	r := s.shard
	r.MaxID = max(s.evens.most, s.odds.most)
	for _, n := range s.counts {
		if n > 0 {
			r.DistinctIDs++
		}
	}
	s.lengths.finish()
	s.judgeType()
	s.judgeSeparator()
	r.Repeats.Worst = s.worst
	if r.BadIDs > 0 {
		s.say(Error, "vocabulary",
			"%s tokens have ids that the tokenizer does not (it has %d; the largest found is %d): "+
				"it is damaged, or another tokenizer made it", quantity.Grouped(r.BadIDs), s.limit, r.MaxID)
	}
	if r.EmptyDocuments > 0 {
		s.say(Note, "documents", "%s of %s documents are empty", quantity.Grouped(r.EmptyDocuments),
			quantity.Grouped(r.Documents))
	}
	if r.LongDocuments > 0 {
		s.find(Finding{Level: Note, Kind: "documents", Document: r.LongestNumber, Byte: -1, Message: fmt.Sprintf(
			"%s documents have %s tokens or more; the longest is number %d with %s", quantity.Grouped(r.LongDocuments),
			quantity.Grouped(s.huge), r.LongestNumber, quantity.Grouped(r.Longest))})
	}
	if n := r.Repeats.Documents; n > 0 {
		w := r.Repeats.Worst
		s.find(Finding{Level: Note, Kind: "repeats", Document: w.Document, Byte: -1, Message: fmt.Sprintf(
			"%s of %s documents, with %s of the tokens, repeat %d tokens or fewer %d times or more; "+
				"the longest stretch is in number %d: the same %d for %s tokens from its token %d on. OLMoE's filter leaves such texts out",
			quantity.Grouped(n), quantity.Grouped(r.Documents), share(r.Repeats.Tokens, r.Tokens), maxPeriod,
			minRepeats, w.Document, w.Period, quantity.Grouped(w.Tokens), w.First)})
	}
	if o.SequenceLength > 0 {
		if r.Windows > 0 {
			return
		}
		s.say(Note, "tail", "its %s tokens are too few for a window of %s: it is never read",
			quantity.Grouped(r.Tokens), quantity.Grouped(int64(o.SequenceLength)+1))
	}
}

func (s *scan) say(level Level, kind, format string, args ...any) {
	s.find(Finding{Level: level, Kind: kind, Document: -1, Byte: -1, Message: fmt.Sprintf(format, args...)})
}

// share writes a part of a whole in percent.
func share(part, whole int64) string { return percent(float64(part) / float64(max(whole, 1))) }

// percent writes a share in percent, to two digits.
func percent(share float64) string { return quantity.Percent(share, 2) }

// fewTokens is the number of tokens below which nothing is said about their type.
const fewTokens = 64

// judgeType tells ids that were read as another type than they were written.
func (s *scan) judgeType() {
	r := s.shard
	if r.Tokens < fewTokens {
		return
	}
	// A 32-bit id below 2^21, read as two of 16 bits, is its lower half and a number below 32.
	low, high := s.evens.most, s.odds.most
	switch {
	case s.width <= 2 && low >= 256 && high < 32 && low < 1<<16:
		s.say(Error, "dtype", "every second id, from the second on, is at most %d, the others reach %d: these are "+
			"ids of four bytes read as two; "+
			"give the type that they were written with", high, low)
	case s.wide*2 > r.Tokens:
		s.say(Error, "dtype", "%s of %s ids are 2097152 or more, which no tokenizer has: these are ids of two bytes "+
			"read as four, or no ids; "+
			"give the type that they were written with", quantity.Grouped(s.wide), quantity.Grouped(r.Tokens))
	case s.width == 4 && r.MaxID < 1<<16 && r.Layout == "dolma" && s.limit <= 1<<16:
		s.say(Warning, "dtype",
			"its ids have four bytes, but OLMo reads files of a vocabulary of %d as uint16, every second id as 0: write them as uint16",
			s.limit)
	case s.width == 4 && r.MaxID < 1<<16 && s.narrower():
		s.say(Note, "dtype", "its ids have four bytes, two would do (the largest is %d)", r.MaxID)
	}
}

// narrower says whether the layout allows ids of fewer than four bytes for the vocabulary, or for
// the ids that occur where that is not known.
func (s *scan) narrower() bool {
	l, err := formats.ParseLayout(s.shard.Layout)
	vocabulary := int64(s.shard.MaxID) + 1
	if s.limit <= math.MaxInt32 {
		vocabulary = s.limit
	}
	return err == nil && formats.Width(l, int(vocabulary)) < 4
}

// judgeSeparator compares the separator that documents should have with what ends them.
func (s *scan) judgeSeparator() {
	r, x := s.shard, &s.shard.Separator
	full := int64(0) // documents with tokens
	for _, n := range s.endings {
		full += n
	}
	x.ID, x.Documents = s.eod, full
	type ending struct {
		id uint32
		n  int64
	}
	var most []ending
	for id, n := range s.endings {
		most = append(most, ending{id, n})
	}
	slices.SortFunc(most, func(a, b ending) int { return cmp.Or(cmp.Compare(b.n, a.n), cmp.Compare(a.id, b.id)) })
	x.LikelyID = -1
	if len(most) > 0 && most[0].n*10 >= full*9 && full >= 3 {
		x.LikelyID, x.LikelyEndings = int64(most[0].id), most[0].n
		if int(most[0].id) < len(s.counts) {
			x.LikelyInside = max(0, s.counts[most[0].id]-most[0].n)
		}
	}
	likely := fmt.Sprintf("id %d ends %s of them and stands inside %s times", x.LikelyID,
		quantity.Grouped(x.LikelyEndings), quantity.Grouped(x.LikelyInside))
	switch {
	case full == 0:
	case s.eod >= 0 && x.Endings == 0 && x.LikelyID >= 0:
		s.say(Error, "separator",
			"id %d, which should end every document, ends none of %s; %s: that is the separator of these data, "+
				"say so wherever the id is configured", s.eod, quantity.Grouped(full), likely)
	case s.eod >= 0 && x.Endings == 0:
		s.say(Warning, "separator",
			"id %d, which should end every document, ends none of %s, and no other id ends most of them: "+
				"they were written without a separator, or their borders are wrong", s.eod, quantity.Grouped(full))
	case s.eod >= 0 && x.Endings < full:
		s.find(Finding{Level: Warning, Kind: "separator", Document: x.FirstWithout, Byte: -1, Message: fmt.Sprintf(
			"%s of %s documents do not end with id %d, the first of them number %d: they run into the next one where documents are packed",
			quantity.Grouped(full-x.Endings), quantity.Grouped(full), s.eod, x.FirstWithout)})
	case s.eod < 0 && x.LikelyID >= 0:
		s.say(Note, "separator", "nothing says which id ends documents; %s: it is probably the separator", likely)
	case s.eod < 0 && r.Manifest == "" && full >= 3:
		s.say(Note, "separator",
			"nothing says which id ends documents, and none ends most of them: they run into one another where documents are packed")
	}
	if x.Inside > 0 && x.Endings > 0 {
		s.find(Finding{Level: Warning, Kind: "separator", Document: x.FirstInside, Byte: -1, Message: fmt.Sprintf(
			"id %d, which ends documents, occurs %s times inside %s of them, first in number %d: readers that find borders by it cut them there",
			s.eod, quantity.Grouped(x.Inside), quantity.Grouped(x.InsideDocuments), x.FirstInside)})
	}
}
