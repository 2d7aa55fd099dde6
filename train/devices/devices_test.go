package devices

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"mula/xpu/opencl"
)

// The error of an unknown name has the name.
func TestUnknownDevice(t *testing.T) {
	if _, _, err := New(t.Context(), "gpu", Options{}); err == nil ||
		!strings.Contains(err.Error(), `"gpu"`) {
		t.Errorf("the error is %v", err)
	}
}

// The names of devices, for the devices of a machine.
func TestChooseOpenCL(t *testing.T) {
	device := func(name string, kind opencl.Type) *opencl.Device {
		return &opencl.Device{Name: name, Type: kind, Platform: "the driver of " + strings.Fields(name)[0]}
	}
	large, small, processor := device("Large 100", opencl.GPU), device("Small 5", opencl.GPU), device("Some Processor",
		opencl.CPU)
	twin, plus := device("Large 100", opencl.GPU), device("Large 100 Plus", opencl.GPU)
	rates := map[string]float64{"Large 100": 2e13, "Small 5": 1e12, "Large 100 Plus": 3e13}
	measure := func(_ context.Context, d *opencl.Device) (float64, error) {
		if rate, ok := rates[d.Name]; ok {
			return rate, nil
		}
		return 0, fmt.Errorf("%s does not answer", d.Name)
	}
	mute, silent := device("Mute", opencl.GPU), device("Silent", opencl.GPU)
	none := errors.New("opencl: no OpenCL loader")
	for _, test := range []struct {
		name    string
		devices []*opencl.Device
		missing error
		chosen  string
		why     string // a part of it; "" for none
		err     string // a part of it; "" for none
	}{
		{"auto", nil, none, "cpu", "auto: no GPU: opencl: no OpenCL loader", ""},
		{"auto", []*opencl.Device{processor}, nil, "cpu", "auto: no OpenCL device is a GPU", ""},
		{"auto", []*opencl.Device{processor, small}, nil, "opencl:Small 5", "auto: the only kind of GPU", ""},
		{"auto", []*opencl.Device{processor, small, large, twin}, nil, "opencl:Large 100",
			"auto: the fastest of 2 kinds, 2e+04 GFLOP/s", ""},
		{"auto", []*opencl.Device{mute, small}, nil, "opencl:Small 5", "not measured: Mute does not answer", ""},
		{"auto", []*opencl.Device{mute, silent}, nil, "", "",
			"none of 2 kinds of devices works: Mute does not answer"},
		{"auto", []*opencl.Device{mute}, nil, "opencl:Mute", "the only kind", ""},
		{"opencl", nil, none, "", "", "no OpenCL loader"},
		{"opencl", []*opencl.Device{processor}, nil, "opencl:Some Processor", "", ""},
		{"opencl", []*opencl.Device{processor, large, twin}, nil, "opencl:Large 100", "", ""},
		{"opencl", []*opencl.Device{small, large}, nil, "opencl:Large 100", "opencl: the fastest of 2 kinds", ""},
		{"opencl:some", []*opencl.Device{small, processor}, nil, "opencl:Some Processor", "", ""},
		{"opencl:DRIVER OF SMALL", []*opencl.Device{large, small}, nil, "opencl:Small 5", "", ""},
		{"opencl:large", []*opencl.Device{large, plus}, nil, "opencl:Large 100 Plus",
			"opencl:large: the fastest of 2 kinds", ""},
		{"opencl:large 100", []*opencl.Device{plus, large}, nil, "opencl:Large 100", "", ""},
		{"opencl:large#2", []*opencl.Device{small, large, twin}, nil, "opencl:Large 100#2", "", ""},
		{"opencl:medium", []*opencl.Device{small}, nil, "", "",
			`no device has "medium" in its name; available: Small 5`},
	} {
		chosen, why, err := chooseOpenCL(t.Context(), test.name, test.devices, test.missing, measure)
		if chosen != test.chosen || !strings.Contains(why, test.why) || (why == "") != (test.why == "") ||
			(err == nil) != (test.err == "") || err != nil && !strings.Contains(err.Error(), test.err) {
			t.Errorf("%s of %v: %q, because %q, %v", test.name, test.devices, chosen, why, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, _, err := chooseOpenCL(ctx, "auto", []*opencl.Device{mute, silent}, nil, measure); !errors.Is(err,
		context.Canceled) {
		t.Errorf("a done context: %v", err)
	}
	for name, want := range map[string]bool{
		"cpu": true, "onednn": true, "auto": true, "opencl": true, "opencl:a": true, "opencl:a b#12": true,
		"opencl:a#b": true, "opencl:": false, "opencl: ": false, "opencl:#1": false,
		"opencl:a#0": false, "opencl:a#-1": false, "gpu": false, "": false, "opencl#2": false, "openCL": false,
	} {
		if err := Check(name); (err == nil) != want {
			t.Errorf("%q: %v", name, err)
		}
	}
}

// The ranks of a host use equal devices alternately, unless the environment selects a device.
func TestTakeOpenCL(t *testing.T) {
	var devices []*opencl.Device
	for range 3 {
		devices = append(devices, &opencl.Device{Name: "Twin", Type: opencl.GPU})
	}
	all := append([]*opencl.Device{{Name: "Other", Type: opencl.CPU}}, devices...)
	for ranks := 1; ranks < 8; ranks++ {
		taken := map[*opencl.Device]int{}
		said := map[*opencl.Device]int{}
		for number := range ranks {
			d, sharing, err := Options{Number: number, Ranks: ranks}.takeOpenCL("opencl:Twin", all)
			if err != nil {
				t.Fatal(err)
			}
			taken[d]++
			said[d] = sharing
			if d != devices[number%3] {
				t.Errorf("rank %d of %d has another device", number, ranks)
			}
			if d, sharing, err := (Options{Number: number, Ranks: ranks}).takeOpenCL("opencl:Twin#2",
				all); err != nil || d != devices[1] || sharing != ranks {
				t.Errorf("the second: %v, shared by %d, %v", d, sharing, err)
			}
		}
		if diff := cmp.Diff(slices.Sorted(maps.Values(taken)), slices.Sorted(maps.Values(said))); diff != "" {
			t.Errorf("%d ranks (-taken +said):\n%s", ranks, diff)
		}
	}
	for name, want := range map[string]string{"opencl:Twin#4": "no device number 4; the last is 3",
		"opencl:Triplet": `no device has "Triplet" in its name`} {
		if _, _, err := (Options{Ranks: 1}).takeOpenCL(name, all); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
