// Package suggest finds the known name that is closest to a misspelt name.
package suggest

import "math"

// Nearest returns the known name with the smallest edit distance to name, the first of equals. It
// returns "" if every known name differs too much: by more than two bytes and more than a third of
// name, or by more than half of the longer name.
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

// editDistance returns the Levenshtein distance: the number of bytes to insert, delete or replace
// to turn a into b.
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
