package report

import (
	"fmt"

	"mula/internal/page"
)

// Curves beyond the last of [page.Colours] repeat them dashed, then dotted; every curve also
// carries its name.

// strokeClass is the class of a line of the given number; only with dashes does it differ from that
// of eight numbers before.
func strokeClass(colour int, dashes bool) string {
	class := fmt.Sprintf("s%d", colour%page.Colours)
	if turn := colour / page.Colours; dashes && turn > 0 {
		class += fmt.Sprintf(" d%d", (turn-1)%2+1)
	}
	return class
}

// fillClass is the class of an area or dot of the given number; from the ninth on areas are paler.
func fillClass(colour int) string {
	class := fmt.Sprintf("f%d", colour%page.Colours)
	if colour >= page.Colours {
		class += " pale"
	}
	return class
}

// heatSteps is the number of colours on each side of the neutral one in a heat map.
const heatSteps = 8
