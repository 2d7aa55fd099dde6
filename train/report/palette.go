package report

import (
	"fmt"
	"strings"
)

// The colours of curves can be told apart by readers who see red and green, or blue and yellow, alike (after M. Okabe and K. Ito, "Color
// Universal Design", 2008), darker on white and lighter on black so that all of them stand out. Curves beyond the eighth repeat them dashed,
// then dotted; every curve also carries its name.
var (
	paletteLight = []string{"#0072b2", "#d55e00", "#00885f", "#b0408f", "#a67a00", "#3498d8", "#5b5b5b", "#6a51a3"}
	paletteDark  = []string{"#56a8e0", "#ff8c42", "#2fc79a", "#e58ac8", "#e3c04a", "#9bd6ff", "#bdbdbd", "#b3a0f0"}
)

// strokeClass is the class of a line of the given number; only with dashes does it differ from that of eight numbers before.
func strokeClass(colour int, dashes bool) string {
	class := fmt.Sprintf("s%d", colour%len(paletteLight))
	if turn := colour / len(paletteLight); dashes && turn > 0 {
		class += fmt.Sprintf(" d%d", (turn-1)%2+1)
	}
	return class
}

// fillClass is the class of an area or dot of the given number; from the ninth on areas are paler.
func fillClass(colour int) string {
	class := fmt.Sprintf("f%d", colour%len(paletteLight))
	if colour >= len(paletteLight) {
		class += " pale"
	}
	return class
}

// heatSteps is the number of colours on each side of the neutral one in a heat map.
const heatSteps = 8

// The ends of the heat map's scale, and its middle, which is near the page's background.
var (
	heatLight = [3]rgb{{0x1f, 0x5f, 0xa8}, {0xf2, 0xf2, 0xf0}, {0xb3, 0x4a, 0x00}}
	heatDark  = [3]rgb{{0x62, 0xb0, 0xff}, {0x2e, 0x30, 0x33}, {0xff, 0x93, 0x3d}}
)

type rgb [3]float64

func (a rgb) mix(b rgb, t float64) string {
	var c [3]int
	for i := range c {
		c[i] = int(a[i] + (b[i]-a[i])*t + 0.5)
	}
	return fmt.Sprintf("#%02x%02x%02x", c[0], c[1], c[2])
}

// paletteCSS defines the colours as custom properties, to be put into a rule for each mode.
func paletteCSS(colours []string, heat [3]rgb) string {
	var b strings.Builder
	for i, c := range colours {
		fmt.Fprintf(&b, "--c%d:%s;", i, c)
	}
	for i := -heatSteps; i <= heatSteps; i++ {
		t := float64(max(i, -i)) / heatSteps
		end := heat[0]
		if i > 0 {
			end = heat[2]
		}
		fmt.Fprintf(&b, "--h%d:%s;", i+heatSteps, heat[1].mix(end, t))
	}
	return b.String()
}

// classCSS defines the classes that use them.
func classCSS() string {
	var b strings.Builder
	for i := range paletteLight {
		fmt.Fprintf(&b, ".s%d{stroke:var(--c%d)}.f%d{fill:var(--c%d);background:var(--c%d)}\n", i, i, i, i, i)
	}
	for i := range 2*heatSteps + 1 {
		fmt.Fprintf(&b, ".h%d{fill:var(--h%d)}", i, i)
	}
	return b.String()
}
