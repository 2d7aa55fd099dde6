package quantity

import (
	"errors"
	"fmt"
	"math/big"
	"regexp"
	"strconv"
	"strings"
)

var (
	decimal  = regexp.MustCompile(`^[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE]([+-]?[0-9]+))?$`)
	grouped  = regexp.MustCompile(`^[+-]?[0-9][0-9_]*(?:\.[0-9_]+)?$`)
	prefixed = regexp.MustCompile(`^[+-]?0[xXoObB][0-9a-fA-F_]+$`)
)

// Limits of a number's text. They are far beyond the range of float64 and keep the exact value
// small.
const (
	maxText     = 400
	maxExponent = 400
)

// Errors that the errors of this package wrap.
var (
	ErrForm  = errors.New("not a decimal number") // the text is not a number at all
	ErrRange = errors.New("out of range")
)

// Decimal parses a decimal number exactly, such as 12, -0.5 or 1e-3. Other notations are errors
// that suggest the decimal notation: YAML parsers disagree about 010, which some parse as octal 8.
func Decimal(text string) (*big.Rat, error) {
	m := decimal.FindStringSubmatch(text)
	if m == nil {
		switch {
		case prefixed.MatchString(text):
			if n, err := strconv.ParseInt(text, 0, 64); err == nil {
				return nil, fmt.Errorf("%s is not written in decimal; write %d", text, n)
			}
			return nil, fmt.Errorf("%s is not written in decimal", text)
		case grouped.MatchString(text):
			return nil, fmt.Errorf("%s has underscores; write %s", text, strings.ReplaceAll(text, "_", ""))
		}
		return nil, fmt.Errorf("%.80q is %w", text, ErrForm)
	}
	if len(text) > maxText {
		return nil, fmt.Errorf("%.40s… has more than %d characters", text, maxText)
	}
	digits := strings.TrimLeft(text, "+-")
	if len(digits) > 1 && digits[0] == '0' && digits[1] >= '0' && digits[1] <= '9' {
		short := strings.TrimLeft(digits, "0")
		if short == "" || short[0] < '0' || short[0] > '9' {
			short = "0" + short
		}
		return nil, fmt.Errorf("%s starts with 0, which may mean an octal number; write %s", text,
			text[:len(text)-len(digits)]+short)
	}
	if m[1] != "" {
		if e, err := strconv.Atoi(m[1]); err != nil || e > maxExponent || e < -maxExponent {
			return nil, fmt.Errorf("%s is %w", text, ErrRange)
		}
	}
	value, ok := new(big.Rat).SetString(text)
	if !ok {
		return nil, fmt.Errorf("%.80q is %w", text, ErrForm)
	}
	return value, nil
}

// suffixes are the powers of ten that a count may end with. G and B both mean 10⁹.
var suffixes = map[byte]int64{'k': 1e3, 'K': 1e3, 'M': 1e6, 'G': 1e9, 'B': 1e9, 'T': 1e12}

// Count parses a whole number with an optional suffix: k or K, M, G or B, and T are powers of 1000;
// Ki, Mi, Gi and Ti are powers of 1024. So 20k is 20000 and 1.5B is 1500000000. It returns an error
// if the number is not whole or does not fit an int64.
func Count(text string) (int64, error) {
	number, unit := text, int64(1)
	if n := len(text); n > 2 && text[n-1] == 'i' && strings.IndexByte("KMGT", text[n-2]) >= 0 {
		number, unit = text[:n-2], int64(1)<<(10*(1+strings.IndexByte("KMGT", text[n-2])))
	} else if n > 1 && suffixes[text[n-1]] != 0 {
		number, unit = text[:n-1], suffixes[text[n-1]]
	}
	value, err := Decimal(strings.TrimSpace(number))
	if err != nil {
		return 0, err
	}
	value.Mul(value, new(big.Rat).SetInt64(unit))
	if !value.IsInt() {
		return 0, fmt.Errorf("%s is not a whole number", text)
	}
	if !value.Num().IsInt64() {
		return 0, fmt.Errorf("%s is %w: the largest number is %s", text, ErrRange, Grouped(int64(1<<63-1)))
	}
	return value.Num().Int64(), nil
}
