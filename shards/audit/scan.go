package audit

import (
	"fmt"
	"math/bits"
)

// maxCounted is the number of ids whose occurrences are counted individually.
const maxCounted = 1 << 20

// maxEndings is the maximum number of different last tokens of documents that are counted.
const maxEndings = 1 << 16

// A scan processes the tokens of one shard, document by document, in constant memory.
type scan struct {
	shard   *Shard
	number  int // index of the shard
	limit   int64
	eod     int64 // the id that should end each document, or -1
	huge    int64
	find    func(Finding) // adds the source and the path
	sample  *sample
	width   int64 // bytes of an id on disk, 0 if not known
	lengths *Lengths

	token    int64            // position of the next token in the shard
	counts   []int64          // occurrences by id
	endings  map[uint32]int64 // documents by their last id
	evens    parity           // tokens at even and odd positions
	odds     parity
	wide     int64 // tokens whose id needs more than 21 bits
	repeats  repeats
	worst    Repeat // the longest repetition
	repeated int    // smallest period in the document, 0 without repetitions

	// State of the current document.
	document int64
	hash     documentHash
	read     int64
	marks    int64 // occurrences of the separator
	last     uint32
}

// parity has statistics of every second token.
type parity struct {
	tokens int64
	most   uint32
}

func newScan(shard *Shard, number int, limit, eod, huge, width int64, sample *sample, find func(Finding)) *scan {
	s := &scan{shard: shard, number: number, limit: limit, eod: eod, huge: huge, width: width, sample: sample,
		find: find, lengths: &shard.Lengths,
		counts: make([]int64, 1<<16), endings: map[uint32]int64{}, worst: Repeat{Document: -1}}
	s.repeats.found = func(r Repeat) {
		r.Document = s.document
		if s.repeated == 0 || r.Period < s.repeated {
			s.repeated = r.Period
		}
		if r.Tokens > s.worst.Tokens {
			s.worst = r
		}
	}
	return s
}

// part processes the next tokens of the document, buffer[history:]. buffer[:history] must have all
// earlier tokens of the document, or at least the last maxPeriod of them.
func (s *scan) part(buffer []uint32, history int) {
	ids := buffer[history:]
	if len(ids) == 0 {
		return
	}
	before := s.counted(s.eod)
	s.look(ids)
	s.marks += s.counted(s.eod) - before
	if s.eod >= maxCounted {
		s.marks += int64(countOf(ids, uint32(s.eod)))
	}
	s.hash.part(ids)
	s.repeats.part(buffer, history)
	s.read += int64(len(ids))
	s.token += int64(len(ids))
	s.last = ids[len(ids)-1]
}

// look counts ids and records the largest.
func (s *scan) look(ids []uint32) {
	first, second := &s.evens, &s.odds
	if s.token%2 == 1 {
		first, second = second, first
	}
	a, b := first.most, second.most
	first.tokens += int64(len(ids)+1) / 2
	second.tokens += int64(len(ids)) / 2
	rest := ids
	for ; len(rest) >= 2; rest = rest[2:] {
		a, b = max(a, rest[0]), max(b, rest[1])
	}
	if len(rest) == 1 {
		a = max(a, rest[0])
	}
	first.most, second.most = a, b
	most := max(a, b) // the largest id of the shard so far, so that only shards with large ids are slow
	if int(most) >= len(s.counts) && len(s.counts) < maxCounted {
		s.counts = append(s.counts, make([]int64, min(maxCounted, 1<<bits.Len32(most))-len(s.counts))...)
	}
	counts := s.counts
	for _, id := range ids {
		if int(id) < len(counts) {
			counts[id]++
		}
	}
	if most >= 1<<21 {
		for _, id := range ids {
			if id >= 1<<21 {
				s.wide++
			}
		}
	}
	if int64(most) >= s.limit {
		for i, id := range ids {
			if int64(id) < s.limit {
				continue
			}
			if s.shard.BadIDs++; s.shard.BadIDs == 1 {
				at := s.token + int64(i)
				s.find(Finding{Level: Error, Kind: "vocabulary", Document: s.document, Byte: at * s.width,
					Message: fmt.Sprintf(
						"token %d%s has id %d, but the tokenizer has ids below %d: the shard is damaged, or was "+
							"made with another tokenizer",
						at, s.byteText(at), id, s.limit)})
			}
		}
	}
}

func (s *scan) byteText(token int64) string {
	if s.width == 0 {
		return ""
	}
	return fmt.Sprintf(" (byte %d)", token*s.width)
}

// counted returns the number of occurrences of an id, 0 for ids that are not counted.
func (s *scan) counted(id int64) int64 {
	if id < 0 || id >= int64(len(s.counts)) {
		return 0
	}
	return s.counts[id]
}

// countOf returns the number of occurrences of an id in ids.
func countOf(ids []uint32, id uint32) (n int) {
	for _, x := range ids {
		if x == id {
			n++
		}
	}
	return n
}

// end finishes a document.
func (s *scan) end() {
	r, n := s.shard, s.read
	s.lengths.add(n)
	empty := n == 0 || n == 1 && s.marks == 1
	if empty {
		r.EmptyDocuments++
	}
	if n >= s.huge {
		r.LongDocuments++
	}
	if r.LongestNumber < 0 || n > r.Longest {
		r.Longest, r.LongestNumber = n, s.document
	}
	if n > 0 {
		if count, ok := s.endings[s.last]; ok || len(s.endings) < maxEndings {
			s.endings[s.last] = count + 1
		}
		s.separator()
	}
	s.repeats.finish()
	if p := s.repeated; p > 0 {
		r.Repeats.Documents++
		r.Repeats.Tokens += n
		r.Repeats.ByPeriod[p-1]++
		s.repeated = 0
	}
	if hash := s.hash.finish(); n > 0 {
		// Each document is mixed into the hash of the previous ones, so that only the same
		// documents in the same order produce the same hash.
		high, low := bits.Mul64(r.content^hashA, hash^hashB)
		r.content = high ^ low
		if !empty {
			s.sample.add(hash, sampled{times: 1, tokens: n, shard: s.number, document: s.document})
		}
	}
	s.read, s.marks = 0, 0
	s.document++
}

// separator counts whether the document ends with the separator, and the separators inside.
func (s *scan) separator() {
	if s.eod < 0 {
		return
	}
	x := &s.shard.Separator
	inside := s.marks
	if int64(s.last) == s.eod {
		x.Endings++
		inside--
	} else if x.FirstWithout < 0 {
		x.FirstWithout = s.document
	}
	if inside > 0 {
		if x.Inside += inside; x.FirstInside < 0 {
			x.FirstInside = s.document
		}
		x.InsideDocuments++
	}
}
