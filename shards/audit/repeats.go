package audit

// What OLMoE's instance filter looks for: 1 to 13 tokens that are repeated 32 times or more, one
// after the other (OLMo, configuration instance_filter with repetition_min_period 1,
// repetition_max_period 13, repetition_max_count 32; the data of OLMoE-mix-0924 was cleaned of
// documents with them). Tokens are repeated k times with period p where they are a stretch of k·p,
// or up to p−1 more, in each of which, but the first p, stands the token of p places before: a run
// of at least (k−1)·p equalities.
const (
	maxPeriod  = 13
	minRepeats = 32
)

// A Repeat is a stretch of a document in which few tokens are repeated over and over.
type Repeat struct {
	Document int64 `json:"document"` // -1 for none
	First    int64 `json:"first"`    // its first token, counted from the document's
	Tokens   int64 `json:"tokens"`   // its length
	Period   int   `json:"period"`   // after how many tokens they come again
}

// repeats finds the stretches of one document that is given in parts. It looks at few tokens: of a
// run of 31·p equalities, one is at any place of those that are multiples of 31·p, whatever number
// they are counted from; from there it is followed to both sides.
type repeats struct {
	seen  int64                // tokens of the document so far
	open  [maxPeriod + 1]int64 // by period: equalities in a row at the end of them
	found func(Repeat)
}

// part takes the next tokens of the document, buffer[history:]; before them stand its last tokens
// so far, all or at least maxPeriod.
func (r *repeats) part(buffer []uint32, history int) {
	for p := 1; p <= maxPeriod; p++ {
		r.period(buffer, history, p)
	}
	r.seen += int64(len(buffer) - history)
}

// period follows one period through a part. Places are those in the buffer; at place i stands an
// equality if buffer[i] is buffer[i-p].
func (r *repeats) period(buffer []uint32, history, p int) {
	stride := (minRepeats - 1) * p
	n := len(buffer)
	none := max(history, p) - 1 // the last place that is known to have no equality, or none of this part
	if open := r.open[p]; open > 0 {
		i := history
		for i < n && buffer[i] == buffer[i-p] {
			i++
		}
		length := open + int64(i-history)
		if i == n {
			r.open[p] = length
			return
		}
		r.end(history, i, length, p)
		none = i
	}
	for i := none + stride; i < n; i += stride {
		if buffer[i] != buffer[i-p] {
			continue
		}
		first := i
		for first-1 > none && buffer[first-1] == buffer[first-1-p] {
			first--
		}
		for i++; i < n && buffer[i] == buffer[i-p]; i++ {
		}
		if i == n {
			r.open[p] = int64(n - first)
			return
		}
		r.end(history, i, int64(i-first), p)
		none = i
	}
	last := n
	for last-1 > none && buffer[last-1] == buffer[last-1-p] {
		last--
	}
	r.open[p] = int64(n - last)
}

// end takes up a run of equalities that ends before place i of the buffer.
func (r *repeats) end(history, i int, length int64, p int) {
	if length >= int64((minRepeats-1)*p) {
		r.found(Repeat{Document: -1, First: r.seen + int64(i-history) - length - int64(p), Tokens: length + int64(p),
			Period: p})
	}
}

// finish takes up what is open at the end of the document, and begins the next.
func (r *repeats) finish() {
	for p := 1; p <= maxPeriod; p++ {
		r.end(0, 0, r.open[p], p)
		r.open[p] = 0
	}
	r.seen = 0
}
