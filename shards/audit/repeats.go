package audit

// The criterion of OLMoE's instance filter: 1 to 13 tokens that are repeated at least 32 times in
// succession (OLMo, configuration instance_filter with repetition_min_period 1,
// repetition_max_period 13, repetition_max_count 32; the data of OLMoE-mix-0924 was cleaned of
// documents with such repetitions). k repetitions with period p are a range of k·p to k·p+p−1
// tokens in which every token, except the first p, equals the token p positions before: a run of at
// least (k−1)·p equalities.
const (
	maxPeriod  = 13
	minRepeats = 32
)

// A Repeat is a range of a document in which a few tokens are repeated many times.
type Repeat struct {
	Document int64 `json:"document"` // -1 for none
	First    int64 `json:"first"`    // position of its first token in the document
	Tokens   int64 `json:"tokens"`   // its length
	Period   int   `json:"period"`   // distance of the repetitions in tokens
}

// repeats finds the repetitions in one document, which is passed in chunks. It examines few tokens:
// a run of 31·p equalities always includes a position that is a multiple of 31·p, from any origin.
// From that position the run is followed in both directions.
type repeats struct {
	seen  int64                // tokens of the document so far
	open  [maxPeriod + 1]int64 // by period: equalities in a row at the end of them
	found func(Repeat)
}

// part processes the next tokens of the document, buffer[history:]. buffer[:history] must have all
// earlier tokens of the document, or at least the last maxPeriod of them.
func (r *repeats) part(buffer []uint32, history int) {
	for p := 1; p <= maxPeriod; p++ {
		r.period(buffer, history, p)
	}
	r.seen += int64(len(buffer) - history)
}

// period follows one period through a chunk. Positions are indices of the buffer. Position i is an
// equality if buffer[i] equals buffer[i-p].
func (r *repeats) period(buffer []uint32, history, p int) {
	stride := (minRepeats - 1) * p
	n := len(buffer)
	none := max(history, p) - 1 // the last position known to be no equality, or before this chunk
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

// end records a run of equalities that ends before position i of the buffer.
func (r *repeats) end(history, i int, length int64, p int) {
	if length >= int64((minRepeats-1)*p) {
		r.found(Repeat{Document: -1, First: r.seen + int64(i-history) - length - int64(p), Tokens: length + int64(p),
			Period: p})
	}
}

// finish records the open runs at the end of the document, and starts the next document.
func (r *repeats) finish() {
	for p := 1; p <= maxPeriod; p++ {
		r.end(0, 0, r.open[p], p)
		r.open[p] = 0
	}
	r.seen = 0
}
