package blend

import (
	"errors"
	"fmt"
	"math/big"
	"math/bits"
	"regexp"
	"strconv"
	"strings"

	"github.com/goccy/go-yaml/ast"

	"mula/blend/mixture"
	"mula/internal/quantity"
)

// A Number is a non-negative rational number, stored exactly and with its original text: "2",
// "0.948", "9.5e-4" or "1/3". The zero Number is not set. It is never converted to floating point.
type Number struct {
	text string
	rat  *big.Rat
}

// Limits on the text of a number, so that the integers computed from it stay small.
const (
	maxDigits   = 64
	maxExponent = 64
)

var numberPattern = regexp.MustCompile(`^(?:([0-9]+)(?:\.([0-9]+))?(?:[eE]([+-]?[0-9]+))?|([0-9]+)/([0-9]+))$`)

// ParseNumber parses a decimal ("0.948", "2", "1e-3") or a fraction of integers ("1/3").
func ParseNumber(text string) (Number, error) {
	m := numberPattern.FindStringSubmatch(text)
	switch {
	case m == nil && len(text) > 1 && text[0] == '-':
		return Number{}, fmt.Errorf("%q is negative", text)
	case m == nil:
		return Number{}, fmt.Errorf("%.80q is not a number; write a decimal such as 0.948 or a fraction such as 1/3",
			text)
	case len(text) > maxDigits:
		return Number{}, fmt.Errorf("%.80q… has more than %d characters", text[:16], maxDigits)
	}
	if e := m[3]; e != "" {
		if n, err := strconv.Atoi(e); err != nil || n > maxExponent || n < -maxExponent {
			return Number{}, fmt.Errorf("the exponent of %q is not between -%d and %d", text, maxExponent, maxExponent)
		}
	}
	rat, ok := new(big.Rat).SetString(text) // fails for a zero denominator
	if !ok {
		return Number{}, fmt.Errorf("%q divides by zero", text)
	}
	return Number{text, rat}, nil
}

// integer returns a whole number as a Number.
func integer(n int64) Number { return Number{strconv.FormatInt(n, 10), new(big.Rat).SetInt64(n)} }

// String returns the original text, or "" if the number is not set.
func (n Number) String() string { return n.text }

// IsSet reports whether the number is set.
func (n Number) IsSet() bool { return n.rat != nil }

// sign returns -1, 0 or 1, and 0 for a number that is not set.
func (n Number) sign() int {
	if n.rat == nil {
		return 0
	}
	return n.rat.Sign()
}

// UnmarshalYAML parses the number from the text of the file.
func (n *Number) UnmarshalYAML(node ast.Node) error {
	var text string
	switch node := node.(type) {
	case *ast.IntegerNode, *ast.FloatNode:
		text = node.GetToken().Value
	case *ast.StringNode:
		text = node.Value
	case *ast.InfinityNode, *ast.NanNode:
		return fmt.Errorf("%s is not a finite number", node.GetToken().Value)
	default:
		return errors.New("want a number such as 0.948 or 1/3")
	}
	if share, ok := strings.CutSuffix(text, "%"); ok {
		if v, err := ParseNumber(strings.TrimSpace(share)); err == nil {
			hundredth := new(big.Rat).Quo(v.rat, big.NewRat(100, 1))
			if digits, exact := hundredth.FloatPrec(); exact {
				return fmt.Errorf("%q is a percentage; write %s", text, hundredth.FloatString(digits))
			}
		}
	}
	for part := range strings.SplitSeq(text, "/") {
		if _, err := quantity.Decimal(part); err != nil && !errors.Is(err, quantity.ErrForm) &&
			!errors.Is(err, quantity.ErrRange) && len(part) <= maxDigits {
			return err // such as 010, which the library reads as octal in a fraction
		}
	}
	parsed, err := ParseNumber(text)
	if err != nil {
		return err
	}
	*n = parsed
	return nil
}

// ceilTimes returns ceil(n·count), and floorTimes returns floor(n·count). count must not be
// negative. ok is false if the result overflows.
func (n Number) ceilTimes(count int64) (int64, bool) {
	p := new(big.Rat).Mul(n.rat, new(big.Rat).SetInt64(count))
	q, r := new(big.Int).QuoRem(p.Num(), p.Denom(), new(big.Int))
	if r.Sign() > 0 {
		q.Add(q, big.NewInt(1))
	}
	return q.Int64(), q.IsInt64()
}

func (n Number) floorTimes(count int64) (int64, bool) {
	p := new(big.Rat).Mul(n.rat, new(big.Rat).SetInt64(count))
	q := new(big.Int).Quo(p.Num(), p.Denom())
	return q.Int64(), q.IsInt64()
}

// integers scales weights to the smallest integers with the same ratios. It multiplies by the least
// common multiple of the denominators and divides by the greatest common divisor. A Number that is
// not set stays 0. At least one must be set, and set numbers must be positive.
func integers(weights []Number) ([]uint64, error) {
	errTooLarge := fmt.Errorf("exact integer weights would add up to more than 2^62; write the weights with fewer " +
		"digits")
	multiple := big.NewInt(1)
	for _, w := range weights {
		if !w.IsSet() {
			continue
		}
		d := w.rat.Denom()
		multiple.Mul(multiple, new(big.Int).Quo(d, new(big.Int).GCD(nil, nil, multiple, d)))
		if multiple.BitLen() > 4096 { // no weight of 64 digits can cancel that much
			return nil, errTooLarge
		}
	}
	scaled := make([]*big.Int, len(weights))
	divisor := new(big.Int)
	for i, w := range weights {
		if !w.IsSet() {
			continue
		}
		v := new(big.Int).Quo(multiple, w.rat.Denom())
		scaled[i] = v.Mul(v, w.rat.Num())
		divisor.GCD(nil, nil, divisor, scaled[i])
	}
	result := make([]uint64, len(weights))
	var sum uint64
	for i, v := range scaled {
		if v == nil {
			continue
		}
		v.Quo(v, divisor)
		if v.BitLen() > 63 {
			return nil, errTooLarge
		}
		result[i] = v.Uint64()
		var carry uint64
		if sum, carry = bits.Add64(sum, result[i], 0); carry != 0 || sum > mixture.MaxSum {
			return nil, errTooLarge
		}
	}
	return result, nil
}
