package page

import (
	"fmt"
	"strings"
)

// Colours is the number of distinct colours of a chart. They are also distinct with red-green or
// blue-yellow colour blindness (after M. Okabe and K. Ito, "Color Universal Design", 2008), and are
// darker on white and lighter on black for contrast. Number k is the custom property --ck. Class sk
// uses it as stroke, class fk as fill and background.
const Colours = 8

var (
	coloursLight = [Colours]string{"#0072b2", "#d55e00", "#00885f", "#b0408f", "#a67a00", "#3498d8", "#5b5b5b",
		"#6a51a3"}
	coloursDark = [Colours]string{"#56a8e0", "#ff8c42", "#2fc79a", "#e58ac8", "#e3c04a", "#9bd6ff", "#bdbdbd",
		"#b3a0f0"}
)

// The ends of the scale of heat maps, and the middle, which is close to the page's background.
// Number k is the fill and background of class hk.
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

// colours returns the CSS that defines the colours in both modes and the classes that use them.
func colours(heatSteps int) string {
	var b strings.Builder
	fmt.Fprintf(&b, ":root{%s}\n@media screen and (prefers-color-scheme:dark){:root{%s}}\n",
		properties(coloursLight, heatLight, heatSteps), properties(coloursDark, heatDark, heatSteps))
	for i := range Colours {
		fmt.Fprintf(&b, ".s%d{stroke:var(--c%d)}.f%d{fill:var(--c%d);background:var(--c%d)}\n", i, i, i, i, i)
	}
	for i := 0; heatSteps > 0 && i <= 2*heatSteps; i++ {
		fmt.Fprintf(&b, ".h%d{fill:var(--h%d);background:var(--h%d)}\n", i, i, i)
	}
	return b.String()
}

func properties(colours [Colours]string, heat [3]rgb, heatSteps int) string {
	var b strings.Builder
	for i, c := range colours {
		fmt.Fprintf(&b, "--c%d:%s;", i, c)
	}
	for i := -heatSteps; heatSteps > 0 && i <= heatSteps; i++ {
		end := heat[0]
		if i > 0 {
			end = heat[2]
		}
		fmt.Fprintf(&b, "--h%d:%s;", i+heatSteps, heat[1].mix(end, float64(max(i, -i))/float64(heatSteps)))
	}
	return b.String()
}
