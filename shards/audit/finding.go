package audit

import (
	"cmp"
	"fmt"
	"math"
	"slices"

	"mula/internal/quantity"
	"mula/shards/formats"
)

// A Level is the severity of a finding.
type Level string

// The levels.
const (
	Error   Level = "error"   // the data is wrong
	Warning Level = "warning" // the data is probably not as intended
	Note    Level = "note"    // information
)

// A Finding is a problem or a remark.
type Finding struct {
	Level    Level  `json:"level"`
	Kind     string `json:"kind"` // hash, structure, dtype, separator, vocabulary, documents, copy, tail, repeats
	Source   string `json:"source"`
	Path     string `json:"path"`
	Document int64  `json:"document"` // its number, -1 if the finding is not about one document
	Byte     int64  `json:"byte"`     // in the file of ids, -1 if the finding has no position
	Message  string `json:"message"`  // the problem and the remedy
}

// judge adds the findings that follow from the counts of a shard.
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
			"%s tokens have ids outside the vocabulary of %d (the largest is %d): "+
				"the shard is damaged, or was made with another tokenizer", quantity.Grouped(r.BadIDs), s.limit,
			r.MaxID)
	}
	if r.EmptyDocuments > 0 {
		s.say(Note, "documents", "%s of %s documents are empty", quantity.Grouped(r.EmptyDocuments),
			quantity.Grouped(r.Documents))
	}
	if r.LongDocuments > 0 {
		s.find(Finding{Level: Note, Kind: "documents", Document: r.LongestNumber, Byte: -1, Message: fmt.Sprintf(
			"%s documents have %s tokens or more; the longest is document %d with %s",
			quantity.Grouped(r.LongDocuments),
			quantity.Grouped(s.huge), r.LongestNumber, quantity.Grouped(r.Longest))})
	}
	if n := r.Repeats.Documents; n > 0 {
		w := r.Repeats.Worst
		s.find(Finding{Level: Note, Kind: "repeats", Document: w.Document, Byte: -1, Message: fmt.Sprintf(
			"%s of %s documents, with %s of the tokens, repeat %d tokens or fewer %d times or more; "+
				"the longest repetition is in document %d: period %d for %s tokens from token %d. OLMoE's filter "+
				"removes such documents",
			quantity.Grouped(n), quantity.Grouped(r.Documents), share(r.Repeats.Tokens, r.Tokens), maxPeriod,
			minRepeats, w.Document, w.Period, quantity.Grouped(w.Tokens), w.First)})
	}
	if o.SequenceLength > 0 {
		if r.Windows > 0 {
			return
		}
		s.say(Note, "tail", "its %s tokens are too few for a window of %s: the shard is never read",
			quantity.Grouped(r.Tokens), quantity.Grouped(int64(o.SequenceLength)+1))
	}
}

func (s *scan) say(level Level, kind, format string, args ...any) {
	s.find(Finding{Level: level, Kind: kind, Document: -1, Byte: -1, Message: fmt.Sprintf(format, args...)})
}

// share formats part/whole as a percentage.
func share(part, whole int64) string { return percent(float64(part) / float64(max(whole, 1))) }

// percent formats a fraction as a percentage with two digits.
func percent(share float64) string { return quantity.Percent(share, 2) }

// fewTokens is the number of tokens below which their type is not checked.
const fewTokens = 64

// judgeType detects ids that were read with another type than they were written with.
func (s *scan) judgeType() {
	r := s.shard
	if r.Tokens < fewTokens {
		return
	}
	// A 32-bit id below 2^21, read as two of 16 bits, is its lower half and a number below 32.
	low, high := s.evens.most, s.odds.most
	switch {
	case s.width <= 2 && low >= 256 && high < 32 && low < 1<<16:
		s.say(Error, "dtype", "every second id is at most %d, and the other ids reach %d: ids of four bytes were read "+
			"as two; give the type with which they were written", high, low)
	case s.wide*2 > r.Tokens:
		s.say(Error, "dtype", "%s of %s ids are 2097152 or more, which no tokenizer has: ids of two bytes were "+
			"read as four, or the data is not ids; give the type with which they were written",
			quantity.Grouped(s.wide), quantity.Grouped(r.Tokens))
	case s.width == 4 && r.MaxID < 1<<16 && s.derives() != "" && s.limit <= 1<<16:
		s.say(Warning, "dtype",
			"its ids have four bytes, but %s reads them as uint16 for a vocabulary of %d, with every second id "+
				"0; write them as uint16", s.derives(), s.limit)
	case s.width == 4 && r.MaxID < 1<<16 && s.narrower():
		s.say(Note, "dtype", "its ids have four bytes, but two are enough (the largest is %d)", r.MaxID)
	}
}

// derives returns the framework that derives the element type from the vocabulary, "" if the
// framework of the shard's layout does not.
func (s *scan) derives() string {
	l, err := formats.Named(s.shard.Layout)
	if err != nil {
		return ""
	}
	return l.Derives
}

// narrower reports whether the layout allows ids of fewer than four bytes for the vocabulary, or,
// if that is not known, for the ids in the shard.
func (s *scan) narrower() bool {
	l, err := formats.Named(s.shard.Layout)
	vocabulary := int64(s.shard.MaxID) + 1
	if s.limit <= math.MaxInt32 {
		vocabulary = s.limit
	}
	return err == nil && l.DType(int(vocabulary)).Size() < 4
}

// judgeSeparator compares the expected separator with the ids that end documents.
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
	likely := fmt.Sprintf("id %d ends %s of them and occurs inside %s times", x.LikelyID,
		quantity.Grouped(x.LikelyEndings), quantity.Grouped(x.LikelyInside))
	switch {
	case full == 0:
	case s.eod >= 0 && x.Endings == 0 && x.LikelyID >= 0:
		s.say(Error, "separator",
			"end-of-document id %d ends none of %s documents; %s: that id is the separator of this data, "+
				"configure it as such", s.eod, quantity.Grouped(full), likely)
	case s.eod >= 0 && x.Endings == 0:
		s.say(Warning, "separator",
			"end-of-document id %d ends none of %s documents, and no other id ends most of them: "+
				"they were written without a separator, or their boundaries are wrong", s.eod, quantity.Grouped(full))
	case s.eod >= 0 && x.Endings < full:
		s.find(Finding{Level: Warning, Kind: "separator", Document: x.FirstWithout, Byte: -1, Message: fmt.Sprintf(
			"%s of %s documents do not end with id %d, first document %d: packing joins them to the next document",
			quantity.Grouped(full-x.Endings), quantity.Grouped(full), s.eod, x.FirstWithout)})
	case s.eod < 0 && x.LikelyID >= 0:
		s.say(Note, "separator", "unknown end-of-document id; %s: it is probably the separator", likely)
	case s.eod < 0 && r.Manifest == "" && full >= 3:
		s.say(Note, "separator",
			"unknown end-of-document id, and no id ends most documents: packing joins them without a separator")
	}
	if x.Inside > 0 && x.Endings > 0 {
		s.find(Finding{Level: Warning, Kind: "separator", Document: x.FirstInside, Byte: -1, Message: fmt.Sprintf(
			"end-of-document id %d occurs %s times inside %s documents, first in document %d: readers that split "+
				"at this id cut them there",
			s.eod, quantity.Grouped(x.Inside), quantity.Grouped(x.InsideDocuments), x.FirstInside)})
	}
}
