package estimate

import (
	"bytes"
	"encoding/xml"
	"errors"
	"io"
	"strconv"
	"strings"
	"testing"
)

// A chart is a self-contained image: well-formed, nothing outside its frame, with a bar for each
// step and a line for each curve.
func TestChart(t *testing.T) {
	for _, model := range []string{"mula-20b-a2b", "mula-220b-a10b"} {
		var results []*Result
		var curves []Curve
		for _, scheme := range []Scheme{SO, EPSO, Unsharded} {
			in, err := publishedInput(model, scheme)
			if err != nil {
				t.Fatal(err)
			}
			in.Model = "<" + model + "> & more"
			r, err := Compute(in)
			if err != nil {
				t.Fatal(err)
			}
			points, err := Scaling(in, 384, 12288, false)
			if err != nil {
				t.Fatal(err)
			}
			results = append(results, r)
			curves = append(curves, Curve{scheme, points})
		}
		check := func(image []byte, lines int) {
			t.Helper()
			var width, height float64
			seen := map[string]int{}
			var words strings.Builder
			d := xml.NewDecoder(bytes.NewReader(image))
			for {
				token, err := d.Token()
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatal(err)
				}
				if text, ok := token.(xml.CharData); ok {
					words.Write(text)
					words.WriteByte(' ')
				}
				element, ok := token.(xml.StartElement)
				if !ok {
					continue
				}
				seen[element.Name.Local]++
				number, anchor := map[string]float64{}, ""
				for _, a := range element.Attr {
					if a.Name.Local == "href" || strings.Contains(a.Value, "http") && a.Name.Local != "xmlns" {
						t.Errorf("%s=%q needs another file", a.Name.Local, a.Value)
					}
					if a.Name.Local == "text-anchor" {
						anchor = a.Value
					}
					if v, err := strconv.ParseFloat(a.Value, 64); err == nil {
						number[a.Name.Local] = v
					}
				}
				switch element.Name.Local {
				case "svg":
					width, height = number["width"], number["height"]
				case "text":
					inner, err := d.Token()
					if err != nil {
						t.Fatal(err)
					}
					text := string(inner.(xml.CharData))
					words.WriteString(text + " ")
					wide := 6.7 * float64(len([]rune(text))) // at a mean width of a character, on the safe side
					left := number["x"] - map[string]float64{"start": 0, "middle": 0.5, "end": 1}[anchor]*wide
					if left < 0 || left+wide > width || number["y"] > height {
						t.Errorf("%q from %g to %g at %g is outside of %g×%g", text, left, left+wide, number["y"],
							width, height)
					}
				case "rect", "circle":
					x, y := number["x"]+number["cx"], number["y"]+number["cy"]
					if x < 0 || y < 0 || x+number["width"] > width+0.1 || y+number["height"] > height+0.1 {
						t.Errorf("%s at %g, %g is outside of %g×%g", element.Name.Local, x, y, width, height)
					}
				}
			}
			if seen["polyline"] != lines || seen["circle"] != 6*lines || seen["rect"] < 1+3*4 {
				t.Errorf("%v: want %d lines", seen, lines)
			}
			for _, want := range []string{"<" + model + "> & more on aurora", "unsharded", "epso", "gradients"} {
				if !strings.Contains(words.String(), want) {
					t.Errorf("%q is not in the chart", want)
				}
			}
		}
		check(Chart(results, curves), 3)
		check(Chart(results, nil), 0)
	}
}
