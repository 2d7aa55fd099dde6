// Package suggest finds the known name that somebody who typed an unknown one may have meant.
package suggest

import "math"

// Nearest returns the known name that needs the fewest changed letters to become name, the first of
// equals, or "" when none is alike: when more than two letters and more than a third of them would
// have to change, or more than half of them.
func Nearest(name string, known []string) string {
	if len(name) > 100 {
		return ""
	}
	best, distance := "", math.MaxInt
	for _, k := range known {
		if d := editDistance(name, k); d < distance && d <= max(2, len(name)/3) && d <= max(len(name), len(k))/2 {
			best, distance = k, d
		}
	}
	return best
}

// editDistance is Levenshtein's: how many bytes must be inserted, deleted or replaced to turn a
// into b.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
