package chart

import "testing"

func TestDrawing(t *testing.T) {
	d := Drawing{Width: 100, Height: 50.25}
	d.Line("grid", 0, -0.01, 10.04, 10.06)
	d.Vertical("mark", 5, 1, 2, "<5>")
	d.Bar("f0", 1, 2, 3, 4, "a & b")
	d.Text("tick", 1.25, 2, End, "1 < 2")
	d.YLabel(7, "y")
	d.Add(`<circle cx="%s" r="%d" fill="%s"/>`, 1.5, 3, "red")
	const want = `<svg class="chart" viewBox="0 0 100 50.2" role="img" aria-label="&#34;x&#34;" id="1">
<path class="grid" d="M0 0L10 10.1"/>
<path class="mark" d="M5 1V2"><title>&lt;5&gt;</title></path>
<rect class="f0" x="1" y="2" width="3" height="4"><title>a &amp; b</title></rect>
<text class="tick" x="1.2" y="2" text-anchor="end">1 &lt; 2</text>
<text class="axis" x="12" y="7" text-anchor="middle" transform="rotate(-90 12 7)">y</text>
<circle cx="1.5" r="3" fill="red"/>
</svg>`
	if got := string(d.Image(`"x"`, ` id="1"`)); got != want {
		t.Errorf("%s\nwant %s", got, want)
	}
}
