package serve

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"mula/blend"
	"mula/internal/suggest"
)

// Limits of requests.
const (
	maxBatchSize   = 1 << 20
	maxWorld       = 1 << 20
	maxRequest     = 16 << 10 // bytes of a request's parameters
	maxQuotedValue = 40       // bytes of a value that are quoted in a message
)

// A Request selects the positions and columns of a [Stream]. [Service.ParseQuery] and
// [Service.ParseJSON] parse it.
type Request struct {
	BatchSize  int      // positions of a step, over all ranks
	Rank       int      // reads part Rank of World equal parts of each step
	World      int      // number of ranks; must divide BatchSize
	From, To   int64    // positions [From, To), see [blend.Grid.Check]; To 0: the end of the plan
	MicroBatch int      // maximum number of rows of a record; must divide BatchSize/World; 0: BatchSize/World
	Columns    []string // in this order; nil for all
}

// streamParameters are the parameters of a request for a stream.
var streamParameters = []string{"batch_size", "rank", "world", "from", "step", "to", "micro_batch", "columns"}

// ParseQuery parses a request from the query of a URL, such as
// batch_size=512&rank=3&world=8&step=100. Each parameter may occur once.
func (s *Service) ParseQuery(query string) (Request, error) {
	return parseQuery(query, s.data.Length())
}

func parseQuery(query string, positions int64) (Request, error) {
	values, err := queryValues(query, streamParameters)
	if err != nil {
		return Request{}, err
	}
	return parseRequest(values, positions)
}

// ParseJSON parses a request from a JSON object of the same parameters, such as {"batch_size": 512,
// "columns": ["position", "tokens"]}. Numbers may be strings. Columns may be a string with commas.
func (s *Service) ParseJSON(text []byte) (Request, error) { return parseJSON(text, s.data.Length()) }

func parseJSON(text []byte, positions int64) (Request, error) {
	values, err := jsonValues(text)
	if err != nil {
		return Request{}, err
	}
	return parseRequest(values, positions)
}

// queryValues parses the query of a URL. known are the allowed parameters.
func queryValues(query string, known []string) (map[string]string, error) {
	if len(query) > maxRequest {
		return nil, refusef(http.StatusBadRequest, "the query has %d bytes; the limit is %d", len(query), maxRequest)
	}
	parsed, err := url.ParseQuery(query)
	if err != nil {
		return nil, refusef(http.StatusBadRequest, "the query is malformed: %s", printable(err.Error()))
	}
	values := make(map[string]string, len(parsed))
	for _, name := range sortedKeys(parsed) {
		if err := checkName(name, known); err != nil {
			return nil, err
		}
		if n := len(parsed[name]); n > 1 {
			return nil, refusef(http.StatusBadRequest, "%s is set %d times; set it once", name, n)
		}
		values[name] = parsed[name][0]
	}
	return values, nil
}

func sortedKeys(values url.Values) []string {
	keys := make([]string, 0, len(values))
	for k := range values {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// jsonValues parses a flat JSON object with the names of streamParameters. Unlike the package json,
// it refuses duplicate names.
func jsonValues(text []byte) (map[string]string, error) {
	if len(text) > maxRequest {
		return nil, refusef(http.StatusBadRequest, "the request has %d bytes; the limit is %d", len(text), maxRequest)
	}
	bad := func(err error) error {
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return refusef(http.StatusBadRequest, "the request is not a JSON object such as {\"batch_size\": 512}: %s",
			printable(err.Error()))
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.UseNumber()
	token, err := d.Token()
	if err != nil {
		return nil, bad(err)
	}
	if token != json.Delim('{') {
		return nil, bad(errors.New("want an object"))
	}
	values := make(map[string]string)
	for d.More() {
		token, err := d.Token()
		if err != nil {
			return nil, bad(err)
		}
		name := token.(string) // the decoder returns only strings here
		if err := checkName(name, streamParameters); err != nil {
			return nil, err
		}
		if _, twice := values[name]; twice {
			return nil, refusef(http.StatusBadRequest, "%s is set twice; set it once", name)
		}
		if values[name], err = jsonValue(d); err != nil {
			return nil, bad(fmt.Errorf("%s: %w", name, err))
		}
	}
	if _, err := d.Token(); err != nil {
		return nil, bad(err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return nil, bad(errors.New("unexpected text after the object"))
	}
	return values, nil
}

// jsonValue reads a number, a string, or a list of strings, which are joined with commas.
func jsonValue(d *json.Decoder) (string, error) {
	token, err := d.Token()
	if err != nil {
		return "", err
	}
	switch token := token.(type) {
	case json.Number:
		return token.String(), nil
	case string:
		return token, nil
	}
	if token != json.Delim('[') {
		return "", errors.New("want a number, a string or a list of strings")
	}
	var list []string
	for d.More() {
		token, err := d.Token()
		if err != nil {
			return "", err
		}
		element, ok := token.(string)
		if !ok || strings.Contains(element, ",") {
			return "", errors.New("want a list of column names")
		}
		list = append(list, element)
	}
	_, err = d.Token()
	return strings.Join(list, ","), err
}

// checkName refuses unknown parameters.
func checkName(name string, known []string) error {
	if slices.Contains(known, name) {
		return nil
	}
	hint := ""
	if near := suggest.Nearest(name, known); near != "" {
		hint = fmt.Sprintf(" (did you mean %s?)", near)
	}
	if len(known) == 0 {
		return refusef(http.StatusBadRequest, "unknown parameter %.*q; this path has no parameters", maxQuotedValue,
			name)
	}
	return refusef(http.StatusBadRequest, "unknown parameter %.*q%s; known are %s", maxQuotedValue, name, hint,
		strings.Join(known, ", "))
}

// printable converts the text of another package to one line that is safe to print.
func printable(text string) string {
	quoted := strconv.Quote(text)
	return strings.ReplaceAll(quoted[1:len(quoted)-1], `\"`, `"`)
}

// number parses a parameter in [least, most]. The default is otherwise.
func number(values map[string]string, name string, least, most, otherwise int64) (int64, error) {
	text, ok := values[name]
	if !ok {
		return otherwise, nil
	}
	n, err := strconv.ParseUint(text, 10, 63)
	if err != nil || int64(n) < least || int64(n) > most {
		return 0, refusef(http.StatusBadRequest, "%s is %.*q; it must be a whole number from %d to %d", name,
			maxQuotedValue, text, least, most)
	}
	return int64(n), nil
}

// parseRequest parses and validates the parameters of a stream. positions is the plan's length.
func parseRequest(values map[string]string, positions int64) (Request, error) {
	var r Request
	for _, p := range []struct {
		name                   string
		least, most, otherwise int64
		set                    func(int64)
	}{
		{"batch_size", 1, maxBatchSize, 0, func(n int64) { r.BatchSize = int(n) }},
		{"rank", 0, maxWorld - 1, 0, func(n int64) { r.Rank = int(n) }},
		{"world", 1, maxWorld, 1, func(n int64) { r.World = int(n) }},
		{"from", 0, positions, 0, func(n int64) { r.From = n }},
		{"to", 1, positions, 0, func(n int64) { r.To = n }},
		{"micro_batch", 1, maxBatchSize, 0, func(n int64) { r.MicroBatch = int(n) }},
	} {
		n, err := number(values, p.name, p.least, p.most, p.otherwise)
		if err != nil {
			return Request{}, err
		}
		p.set(n)
	}
	if r.BatchSize == 0 {
		return Request{}, refusef(http.StatusBadRequest,
			"batch_size is required: the number of samples of a step, over all ranks")
	}
	_, from := values["from"]
	_, stepped := values["step"]
	if from && stepped {
		return Request{}, refusef(http.StatusBadRequest,
			"from and step cannot both be set: from is a position, step is the number of a step; remove one")
	}
	if stepped {
		step, err := number(values, "step", 0, positions/int64(r.BatchSize), 0)
		if err != nil {
			return Request{}, err
		}
		r.From = step * int64(r.BatchSize)
	}
	if text, ok := values["columns"]; ok {
		r.Columns = strings.Split(text, ",")
	}
	err := r.complete()
	return r, err
}

// complete sets the defaults and validates the combination of parameters.
func (r *Request) complete() error {
	if r.World < 1 || r.Rank < 0 || r.From < 0 || r.To < 0 || r.MicroBatch < 0 || r.BatchSize < 1 ||
		r.BatchSize > maxBatchSize {
		return refusef(http.StatusBadRequest, "the request is out of range: %+v", *r)
	}
	rows, err := blend.RecordRows(r.BatchSize, r.Rank, r.World, r.MicroBatch)
	if err != nil {
		return refusef(http.StatusBadRequest, "%v", err)
	}
	r.MicroBatch = rows
	return nil
}
