package report

import (
	"fmt"

	"mula/internal/page"
)

// After the last of [page.Colours], curves repeat the colours dashed, then dotted. Every curve also
// has its name.

// strokeClass returns the class of the line with the given number. Without dashes, the classes
// repeat after eight numbers.
func strokeClass(colour int, dashes bool) string {
	class := fmt.Sprintf("s%d", colour%page.Colours)
	if turn := colour / page.Colours; dashes && turn > 0 {
		class += fmt.Sprintf(" d%d", (turn-1)%2+1)
	}
	return class
}

// fillClass returns the class of an area or dot. From the ninth on, areas are paler.
func fillClass(colour int) string {
	class := fmt.Sprintf("f%d", colour%page.Colours)
	if colour >= page.Colours {
		class += " pale"
	}
	return class
}

// heatSteps is the number of colours on each side of the neutral one in a heat map.
const heatSteps = 8
