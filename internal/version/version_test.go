package version

import (
	"runtime"
	"runtime/debug"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRead(t *testing.T) {
	settings := []debug.BuildSetting{{Key: "-trimpath", Value: "true"}, {Key: "CGO_ENABLED", Value: "0"},
		{Key: "vcs", Value: "git"}, {Key: "vcs.revision", Value: "0123abcd"},
		{Key: "vcs.time", Value: "2026-01-02T03:04:05Z"}, {Key: "vcs.modified", Value: "true"}}
	built := Build{Commit: "0123abcd", Modified: true, Date: "2026-01-02T03:04:05Z", Go: "go1.99",
		Platform: runtime.GOOS + "/" + runtime.GOARCH,
		Settings: map[string]string{"-trimpath": "true", "CGO_ENABLED": "0"}}
	for _, c := range []struct{ number, module, want string }{
		{"1.2.3-4-gabc", "v9.9.9", "1.2.3-4-gabc"},
		{"v1.2.3", "(devel)", "1.2.3"},
		{"", "v0.0.0-20260102030405-0123abcd+dirty", "0.0.0-20260102030405-0123abcd+dirty"},
		{"", "(devel)", unknown},
		{"", "", unknown},
	} {
		want := built
		want.Version = c.want
		got := read(c.number, &debug.BuildInfo{GoVersion: "go1.99", Main: debug.Module{Version: c.module},
			Settings: settings})
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("%q, %q: (-want +got)\n%s", c.number, c.module, d)
		}
	}
}

// Outside git and without the flag of the linker there is a version, and no commit.
func TestUnknown(t *testing.T) {
	b := read("", &debug.BuildInfo{GoVersion: "go1.99"})
	if b.Version != unknown || b.Commit != "" || b.Modified || b.Date != "" || len(b.Settings) != 0 {
		t.Errorf("%+v", b)
	}
	if got := Read(); got.Go != runtime.Version() || got.Version != String() {
		t.Errorf("%+v", got)
	}
}
