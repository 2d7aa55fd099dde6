package page

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"html"
	"io"
	"math"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

type content struct {
	Findings Findings
	Table    Table
	Figures  []Figure
}

var kind = Layout{Command: "mula check", Style: "x{}",
	Body: `{{template "findings" .Findings}}{{template "table" .Table}}{{template "figures" .Figures}}`}

func render(t *testing.T, l Layout, h Head, body any) string {
	t.Helper()
	var out bytes.Buffer
	if err := New(l).Write(&out, h, body); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestWrite(t *testing.T) {
	body := content{Findings{[]Finding{{"error", "a<b", "x & y"}, {"note", "", "z"}}, 7}, Table{[]string{"name", "n"},
		[][]string{{"<i>", "1"}, {"b", "2"}, {"c", "3"}}, 0}.Cut(2),
		[]Figure{{Title: "One", Text: "<first>", Keys: []Key{{"f0", "k&k"}}, Chart: "<svg></svg>"}, {Title: "None"}}}
	page := render(t, kind, Head{Title: "T<t>"}, body)
	for _, want := range []string{"<title>T&lt;t&gt;</title>", "<h1>T&lt;t&gt;</h1>", "x{}</style>",
		`<b class="error">error</b> <code>a&lt;b</code>: x &amp; y</li>`, "</b> z</li>",
		"7 more; <code>mula check --json</code> has all.", "1 more;",
		`<tr><th scope="row">&lt;i&gt;</th><td>1</td></tr>`, "<b>One</b> &lt;first&gt;",
		`<i class="f0"></i>k&amp;k`, "<svg></svg>", "--c7:",
		`content="default-src 'none'; style-src 'unsafe-inline'"`} {
		if !strings.Contains(page, want) {
			t.Errorf("the page does not have %s", want)
		}
	}
	for _, not := range []string{"None", "--h0", "<script", "refresh", ">c<"} {
		if strings.Contains(page, not) {
			t.Errorf("the page has %s", not)
		}
	}
	if again := render(t, kind, Head{Title: "T<t>"}, body); again != page {
		t.Error("the same content gives another page")
	}
	if empty := render(t, kind, Head{}, content{}); !strings.Contains(empty, "<p>None.</p>") ||
		strings.Contains(empty, "more;") {
		t.Error("a page of nothing")
	}
}

// The policy lets the page's own script run, and no other.
func TestScript(t *testing.T) {
	const script = "let a = 1 < 2 && \"x\";\n"
	page := render(t, Layout{Body: "{{.}}", Script: script, HeatSteps: 2}, Head{Reload: 30}, "</script>")
	hash := sha256.Sum256([]byte(script))
	for _, want := range []string{"<script>" + script + "</script>", "; script-src 'sha256-" +
		base64.StdEncoding.EncodeToString(hash[:]) + "'\"", `"refresh" content="30"`, "--h4:#b34a00;"} {
		if !strings.Contains(html.UnescapeString(page), want) {
			t.Errorf("the page does not have %s", want)
		}
	}
	if strings.Count(page, "</script>") != 1 {
		t.Error("the content is not escaped")
	}
}

type failingWriter struct{}

var errFull = errors.New("no space left on device")

func (failingWriter) Write([]byte) (int, error) { return 0, errFull }

func TestWriteFails(t *testing.T) {
	if err := New(kind).Write(failingWriter{}, Head{}, content{}); !errors.Is(err, errFull) {
		t.Errorf("%v", err)
	}
	if err := New(kind).Write(io.Discard, Head{}, 7); err == nil {
		t.Error("content that the template does not know is written")
	}
}

// The colours of curves stand out against the page.
func TestContrast(t *testing.T) {
	luminance := func(hex string) float64 {
		var c [3]float64
		for i := range c {
			v, err := strconv.ParseUint(hex[1+2*i:3+2*i], 16, 8)
			if err != nil {
				t.Fatal(err)
			}
			c[i] = float64(v) / 255
			if c[i] <= 0.04045 {
				c[i] /= 12.92
			} else {
				c[i] = math.Pow((c[i]+0.055)/1.055, 2.4)
			}
		}
		return 0.2126*c[0] + 0.7152*c[1] + 0.0722*c[2]
	}
	backgrounds := regexp.MustCompile(`--page: (#[0-9a-f]+);`).FindAllStringSubmatch(style, -1)
	if len(backgrounds) != 2 || backgrounds[0][1] != "#fff" {
		t.Fatalf("the page's colours are %v", backgrounds)
	}
	for page, colours := range map[string][Colours]string{"#ffffff": coloursLight, backgrounds[1][1]: coloursDark} {
		for i, c := range colours {
			a, b := luminance(page)+0.05, luminance(c)+0.05
			if ratio := max(a/b, b/a); ratio < 2.5 {
				t.Errorf("colour %d, %s, has contrast %.2f on %s", i, c, ratio, page)
			}
		}
	}
}
