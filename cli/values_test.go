package cli

import (
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/urfave/cli/v2"

	"mula/blend/simulate"
	"mula/index/megatron"
	"mula/index/olmo"
	"mula/moe"
	"mula/shards"
	"mula/shards/formats"
	"mula/shards/verifier"
	"mula/tokenize/documents"
	"mula/train/devices"
	"mula/train/estimate"
)

// freeFlags are the flags whose values are files, names, numbers or other text. A new flag belongs
// here or in flagValues, so that no fixed set of values is without a check and completion.
var freeFlags = strings.Fields(`
	config output amend plan shards report root cache token-file tls-cert tls-key socket tokenizer rejects
	data-args-path file-list files-from work complete sums tokenizer-json tokenizer-path like paths plot log from

	data-path train-data-path valid-data-path test-data-path split steps skip reason title document special glob
	text-field id-field tokenizer-name listen flight hosts mpiexec srun remote-shell layout scaling upcycle
	model-files

	eod shard-tokens mds-size-limit shard-size memory max-documents max-rejects piece-size back-off section-timeout`)

// modelFolders are the commands whose --model is a folder.
var modelFolders = []string{"mula eval", "mula generate", "mula export"}

// Every flag with a text is in one of the two lists. A fixed set of values is in the help text, is
// completed, and is checked before the command does anything.
func TestFlagValues(t *testing.T) {
	t.Chdir(t.TempDir())
	used := map[string]bool{}
	check := func(command string, f cli.Flag, usage string) {
		name := f.Names()[0]
		set, ok := valuesOf(command, f)
		free := slices.Contains(freeFlags, name) || name == "model" && slices.Contains(modelFolders, command)
		if ok == free {
			t.Errorf("%s --%s: in flagValues: %v, in freeFlags: %v; want one of them", command, name, ok, free)
		}
		used[name], used[command+" "+name] = true, true
		if !ok {
			return
		}
		names := set.names()
		for _, v := range names {
			if len(names) <= shortList && !strings.Contains(usage, v) {
				t.Errorf("%s --%s: no %q in the help text %q", command, name, v, usage)
			}
		}
		args := strings.Fields(command)[1:]
		_, stdout, _ := call(t, slices.Concat([]string{completeWord}, args, []string{"--" + name, ""})...)
		mode := "words\n"
		if set.file {
			mode = "files\n"
		}
		if want := mode + strings.Join(names, "\t\n") + "\t\n"; stdout != want {
			t.Errorf("%s --%s: completed with %q, want %q", command, name, stdout, want)
		}
		if set.file || set.other {
			return
		}
		want := "--" + name + ` is "xyzzy"; allowed: ` + strings.Join(names, ", ") + "\n"
		if code, stdout, stderr := call(t, append(args, "--"+name, "xyzzy")...); code != exitUsage || stdout != "" ||
			!strings.HasSuffix(stderr, want) {
			t.Errorf("%s --%s xyzzy: exit %d, %q; want %q", command, name, code, stderr, want)
		}
		for _, v := range names {
			if _, _, stderr := call(t, append(args, "--"+name, v, "--xyzzy")...); strings.Contains(stderr, "allowed:") {
				t.Errorf("%s --%s %s: %s", command, name, v, stderr)
			}
		}
	}
	var walk func(command string, commands []*cli.Command)
	walk = func(command string, commands []*cli.Command) {
		for _, c := range commands {
			path := command + " " + c.Name
			walk(path, c.Subcommands)
			for _, f := range c.Flags {
				switch f := f.(type) {
				case *cli.StringFlag:
					check(path, f, f.Usage)
				case *cli.StringSliceFlag:
					check(path, f, f.Usage)
				case *cli.GenericFlag:
					if _, ok := f.Value.(*settingList); !ok {
						t.Errorf("%s --%s: say how the values of this kind of flag are completed", path, f.Name)
					}
				}
			}
		}
	}
	walk("mula", newApp(nil, io.Discard, io.Discard).Commands)
	for name := range flagValues {
		if !used[name] {
			t.Errorf("no command has the flag %s of flagValues", name)
		}
	}
	for _, name := range freeFlags {
		if !used[name] {
			t.Errorf("no command has the flag --%s of freeFlags", name)
		}
	}
	for _, command := range modelFolders {
		if !used[command+" model"] {
			t.Errorf("%s has no --model", command)
		}
	}
}

// The packages accept the names in their lists and no other.
func TestValuesAreRead(t *testing.T) {
	for flag, c := range map[string]struct {
		names []string
		read  func(name string) error
	}{
		"arithmetic": {megatron.Arithmetics(), func(name string) error {
			_,
				err := megatron.ParseArithmetic(name)
			return err
		}},
		"profile": {megatron.ProfileNames(), func(name string) error {
			_,
				err := megatron.ProfileNamed(name)
			return err
		}},
		"dtype":  {shards.IDTypes(), func(name string) error { _, err := shards.ParseDType(name); return err }},
		"to":     {formats.Names(), func(name string) error { _, err := formats.Named(name); return err }},
		"format": {documents.Formats(), func(name string) error { _, err := documents.ParseFormat(name); return err }},
		"unit":   {documents.Units(), func(name string) error { _, err := documents.ParseUnit(name); return err }},
		"verify": {verifier.Names(), func(name string) error { _, err := verifier.Parse(name); return err }},
		"model":  {moe.Presets(), func(name string) error { _, err := moe.Preset(name); return err }},
		"storage": {simulate.KindNames(), func(name string) error {
			_,
				err := simulate.StorageByName(name)
			return err
		}},
		"device": {devices.Names(), devices.Check},
		"trainer": {flagValues["trainer"].names(), func(name string) error {
			_, err := estimate.TrainerByName(name)
			return err
		}},
		"machine": {slices.DeleteFunc(estimate.Machines(),
			func(name string) bool { return name == estimate.LocalName }),
			func(name string) error { _, err := estimate.MachineByName(name); return err }},
		"dtype of OLMo-core": {olmo.DTypes(), func(name string) error {
			d := olmo.Dataset{DType: shards.DType(name), SequenceLength: 8}
			return d.Check()
		}},
	} {
		for _, name := range c.names {
			if err := c.read(name); err != nil {
				t.Errorf("%s %s: %v", flag, name, err)
			}
		}
		if c.read("xyzzy") == nil {
			t.Errorf("%s: xyzzy was accepted", flag)
		}
	}
}

func TestLists(t *testing.T) {
	if _, stdout, _ := call(t, completeWord, "doctor", "--require", "mpi,on"); stdout != "words\nmpi,onednn\t\n" {
		t.Errorf("%q", stdout)
	}
	if _, stdout, _ := call(t, completeWord, "doctor",
		"--require=mpi,on"); stdout != "words\n--require=mpi,onednn\t\n" {
		t.Errorf("%q", stdout)
	}
	if _, stdout, _ := call(t, completeWord, "simulate", "--to", ""); stdout != "words\n" { // a position
		t.Errorf("%q", stdout)
	}
	for args, want := range map[string]string{
		"doctor --require mpi,perl": `--require is "perl"; allowed: mpi, opencl, onednn, python`,
		"index --profile core-0.1l": `--profile is "core-0.1l"; did you mean "core-0.1`,
	} {
		if code, _, stderr := call(t, strings.Fields(args)...); code != exitUsage || !strings.Contains(stderr, want) {
			t.Errorf("%s: exit %d, %q, want %q", args, code, stderr, want)
		}
	}
	for names, want := range map[string]string{"": "", "a": "a", "a b": "a or b", "a b c": "a, b or c"} {
		if got := anyOf(strings.Fields(names)); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}
