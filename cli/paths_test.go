package cli

import (
	"fmt"
	"io"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"

	"mula/blend"
	"mula/internal/strictyaml"
	"mula/train"
)

// Every flag that is a path, and every operand, of every command is refused if it is a URL that the
// command does not support, and nothing is written.
func TestURLs(t *testing.T) {
	t.Chdir(t.TempDir())
	const url = "s3://bucket/x"
	refused := func(args ...string) {
		t.Helper()
		code, stdout, stderr := call(t, args...)
		if code != exitUsage || stdout != "" ||
			!strings.Contains(stderr, url+" is a URL, and this path must be local") ||
			strings.Count(stderr, "\n") != 1 {
			t.Errorf("mula %s: exit %d, %q%q", strings.Join(args, " "), code, stdout, stderr)
		}
	}
	unknown := func(args ...string) { // every command refuses a scheme that mula does not know
		t.Helper()
		code, stdout, stderr := call(t, args...)
		if code != exitUsage || stdout != "" || !strings.Contains(stderr, `unknown scheme "unknown"`) {
			t.Errorf("mula %s: exit %d, %q%q", strings.Join(args, " "), code, stdout, stderr)
		}
	}
	seen, paths := map[string]bool{}, 0
	path := regexp.MustCompile("`(FILE|DIR|PREFIX|PATH|BLEND|HOSTS)`|OLMo-core's own order of these token files")
	var walk func(commands []*cli.Command, before []string)
	walk = func(commands []*cli.Command, before []string) {
		for _, c := range commands {
			args := append(slices.Clone(before), c.Name)
			walk(c.Subcommands, args)
			for _, f := range c.Flags {
				usage := ""
				switch f := f.(type) {
				case *cli.StringFlag:
					usage = f.Usage
				case *cli.StringSliceFlag:
					usage = f.Usage
				default:
					continue
				}
				name := f.Names()[0]
				seen[name] = true
				if notPaths[name] {
					if path.MatchString(usage) && name != "tokenizer-path" {
						t.Errorf("--%s of mula %s is a path by its help", name, strings.Join(args, " "))
					}
					continue
				}
				paths++
				if mayBeURLs[""][name] || mayBeURLs["mula "+strings.Join(args, " ")][name] {
					unknown(append(args, "--"+name, "unknown://bucket/x")...)
					continue
				}
				refused(append(args, "--"+name, url)...)
				refused(append(args, "--"+name, "s3:/b "+url)...)
			}
			name := "mula " + strings.Join(args, " ")
			seen[name] = true
			if operandsMayBeURLs[name] {
				unknown(append(args, "unknown://bucket/x")...)
				for _, operand := range []string{"s3:/bucket/x", "file:///x", "s3://"} {
					code, stdout, stderr := call(t, append(args, operand)...)
					if code != exitUsage || stdout != "" || !strings.Contains(stderr, operand) {
						t.Errorf("%s %s: exit %d, %q%q", name, operand, code, stdout, stderr)
					}
				}
			} else if len(c.Subcommands) == 0 && !notOperands[name] {
				refused(append(args, url)...)
				refused(append(args, "x", "0.5="+url)...)
			}
		}
	}
	app := newApp(nil, io.Discard, io.Discard)
	walk(app.Commands, nil)
	if paths < 50 {
		t.Errorf("only %d flags were tried", paths)
	}
	for name := range notPaths {
		if !seen[name] {
			t.Errorf("no command has the flag --%s of notPaths", name)
		}
	}
	for command, flags := range mayBeURLs {
		for name := range flags {
			if !seen[name] || command != "" && !seen[command] {
				t.Errorf("no command %q has the flag --%s of mayBeURLs", command, name)
			}
		}
	}
	for name := range notOperands {
		if !seen[name] {
			t.Errorf("there is no command %q of notOperands", name)
		}
	}
	if entries, err := os.ReadDir("."); err != nil || len(entries) > 0 {
		t.Errorf("the commands have left %v, %v", entries, err)
	}
}

// Addresses and texts may be URLs.
func TestURLsThatAreNoPaths(t *testing.T) {
	t.Chdir(t.TempDir())
	for _, args := range []string{"where --document https://host/page",
		"blend --amend p.json --output q.json --skip 1:2 --reason https://host/issue",
		"report --title https://host run",
		"generate --model m https://host", "launch -- train --config absent.yaml --set plan=s3://bucket/plan.json",
		"serve --listen http://127.0.0.1:1",
		"tokenizer train --special s3://b --pattern none absent"} {
		if code, _, stderr := call(t, strings.Fields(args)...); code == exitDone ||
			strings.Contains(stderr, "is a URL") {
			t.Errorf("mula %s: exit %d, %q", args, code, stderr)
		}
	}
}

// texts lists the paths of all fields of a configuration that hold texts, as lines of YAML with
// VALUE for the text.
func texts(of reflect.Type, indent string) (found []string) {
	for i := range of.NumField() {
		field := of.Field(i)
		name, options, _ := strings.Cut(field.Tag.Get("yaml"), ",")
		if name == "-" || field.Tag.Get("yaml") == "" || field.Tag.Get("url") == "ok" {
			continue
		}
		if options == "inline" {
			found = append(found, texts(field.Type, indent)...)
			continue
		}
		kind, item := field.Type, ""
		for kind.Kind() == reflect.Pointer || kind.Kind() == reflect.Slice {
			if kind.Kind() == reflect.Slice {
				item = "- "
			}
			kind = kind.Elem()
		}
		switch {
		case kind.Kind() == reflect.String && item != "":
			found = append(found, indent+name+": [VALUE]\n")
		case kind.Kind() == reflect.String:
			found = append(found, indent+name+": VALUE\n")
		case kind.Kind() == reflect.Struct:
			for _, below := range texts(kind, indent+"    ") {
				if item != "" {
					below = strings.Replace(below, indent+"    ", indent+"  - ", 1)
				}
				found = append(found, indent+name+":\n"+below)
			}
		}
	}
	return found
}

func TestURLsInConfigurations(t *testing.T) {
	tried := 0
	for _, v := range []any{new(blend.Config), new(blend.Amendment), new(train.Config)} {
		for _, text := range texts(reflect.TypeOf(v).Elem(), "") {
			tried++
			text = strings.Replace(text, "VALUE", "s3://bucket/x", 1)
			file, err := strictyaml.Parse([]byte(text), "config.yaml")
			if err != nil {
				t.Fatal(text, err)
			}
			err = file.Decode(reflect.New(reflect.TypeOf(v).Elem()).Interface())
			at := fmt.Sprintf("config.yaml:%d: s3://bucket/x is a URL", strings.Count(text, "\n"))
			if err == nil || !strings.Contains(err.Error(), at) {
				t.Errorf("%T:\n%s%v, want %q", v, text, err, at)
			}
		}
	}
	if tried < 10 {
		t.Errorf("only %d fields were tried", tried)
	}
}
