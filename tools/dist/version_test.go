package main

import "testing"

func TestNewVersion(t *testing.T) {
	for _, test := range []struct {
		describe string
		commits  int
		want     version
	}{
		{"0123abc", 7, version{"0.0.0+git.7.g0123abc", "0.0.0+git.7.g0123abc", "0.0.0+git.7.g0123abc",
			"0.0.0_git.7.g0123abc"}},
		{"1234567-dirty", 7, version{"0.0.0+git.7.g1234567.dirty", "0.0.0+git.7.g1234567.dirty",
			"0.0.0+git.7.g1234567.dirty", "0.0.0_git.7.g1234567.dirty"}},
		{"v1.2.3", 7, version{"1.2.3", "1.2.3", "1.2.3", "1.2.3"}},
		{"v1.2.3-dirty", 7, version{"1.2.3+dirty", "1.2.3+dirty", "1.2.3+dirty", "1.2.3_dirty"}},
		{"v1.2.3-rc.1", 7, version{"1.2.3-rc.1", "1.2.3rc1", "1.2.3~rc.1", "1.2.3-rc.1"}},
		{"v1.2.3-beta.2-4-gabc", 7, version{"1.2.3-beta.2+git.4.gabc", "1.2.3b2+git.4.gabc",
			"1.2.3~beta.2+git.4.gabc", "1.2.3-beta.2_git.4.gabc"}},
		{"v1.2.3-40-gabc", 7, version{"1.2.3+git.40.gabc", "1.2.3+git.40.gabc", "1.2.3+git.40.gabc",
			"1.2.3_git.40.gabc"}},
	} {
		got, err := newVersion(test.describe, test.commits)
		if err != nil || got != test.want {
			t.Errorf("%s: got %+v, %v; want %+v", test.describe, got, err, test.want)
		}
	}
	for _, describe := range []string{"", "release", "v1.2", "v1.2.3-preview.1", "v1.2.3-4-gxyz"} {
		if v, err := newVersion(describe, 1); err == nil {
			t.Errorf("%q: %+v, want an error", describe, v)
		}
	}
}
