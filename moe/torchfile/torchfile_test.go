package torchfile

import (
	"bytes"
	"compress/zlib"
	"encoding/base64"
	"errors"
	"io"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"mula/internal/pickle"
	"mula/moe/safetensors"
)

// Files of torch.save of torch 2.15.0, compressed with zlib and in base64, with
//
//	x = torch.arange(12, dtype=torch.float32)
//	d = {"a": x.view(3, 4), "b": x[5:7], "half": torch.tensor([1.5, -2.0]).bfloat16(),
//	     "step": torch.tensor(7), "size": torch.Size([2, 3]),
//	     "p": torch.nn.Parameter(torch.tensor([3.0]))}
//
// saved is d. transposed is d with "t": x.view(3, 4).t(). hostile is [torch.ones(1), e]; to load e
// is to call os.system.
const (
	saved = "eNqllV1P02AUx5+1Wzer8uIbiorvOhRG2zG2KQo0pjc1EUpMFm6WshXWWNad7gHfYiQxoHwJ450fwVs+gQmJ8UYvNFwYr7zl" +
		"Tp+nHbPtMqfQ7LTr0v/v/J+n55xNq2wUoUQCtRw96AjSnVLFXDFGyjrWU7WHliJ3obnAsco8B5QsRIhAh0gJ20SRKi5j06rz" +
		"RceYXzatchEb1brtFFckHphkshAnD9fJk/qiAawn4RXL1vGs9yMPURcoQKzAkmuptgyceghDfEZFKqtG1yGhRtXIOhzYKJVs" +
		"yzJK2LSrdf6+UzYco3zXLGEe+EENDmI4pMFhlzYPXRWSvcJWopVYxeV1z6gxlVmDHjWyBr0bFSo5guGoBscKZFdQRbcW4Lin" +
		"aviUXaPiWNPqCRcuQh9BMhhOUosEeYoi+z3kaQxnNDjrIuvYqMFAAHnPri42cedcnATnCS6C4QLBDQ56mIsYLmlw2cOYTw24" +
		"0gDMkhserqqMyq7DtTVIajDoYmpwvc0bqemOvmRgw+Hhxu6uuJI0DHmZh+lCyBpS9DTiORAwiBpIr92b9CsY1SCznJpW44kX" +
		"4x9MlkGIxnTbkupDuWZJpRZsZ0nHxRXDqZOXp8ijocr6t0Ok2d///PKSmqfRPns/yv7J3qi/om6Zi9Ulo4oVOb0XA2Oj1MDE" +
		"I/hBVo6YvxroRRNNA/NPsGHTclXkW3taeOOwTIwtg3pYu719iiNZuL966EJ3Al09IijyzX0Y8KirE+Q0ST4kVkm8JbFJ4isJ" +
		"NEVmCYnzJIQp6vTx84U7Au3vDk6PBZ2KitzT4nRzAm1SZnxmbps2RrQDczLIlBR5fD/bPxdvkKmH2qfvNk2a6OBhPOghrcg5" +
		"tPf9n5ykuTe2vr3rvP5uXwU2G29f9ZfmafatN4sPOtf/AJL+NKC79LrhmKQDn+p0fhfNsiKn/tOMKGSzuTEpK+Wz+XwuMyqO" +
		"SRlRyGdzGUHIZMjXTF6SpLQ7Jj7v/HqRJD6SrssINdv06R9gPS3Ow/+DYbV/APUFlLMMajfywhD/EOkPQLb8kJbJFeb4B0Fv" +
		"gKOxqHUAheX+7uwKyD+xKDQ7wlp/Fwa1q9GQVgxr/d0T1H4Ma6Ww1l/9QW0hFtKmw1p/7XYH8/q0bd6Zv6QGgnvNoQ7FPq1y" +
		"3NBua7DDTSUfur5kvOsOtztqOHfqPDvg3Xv/ejHO0/Du896zvwEqMDKJ"
	transposed = "eNqllU1T00AYx7dp+kJUKAoiqPiuxZfSJKVpEQUzTi5xRojjDOOlE9pAM4amT7qgMuMMMw4oHj15crz5ETx44St48eRBx4Pj" +
		"yYsfwN0EarIIHSXTJ2k6+//vb3ef5+m0HucRSqfRjiuDDiPTq9btZWu0ZmIz13zoaGo3ehC5VrmngLKzMSIwIVbFLlHkKkvY" +
		"dlpCxbPmlmynVsFWo+V6lWVJAC6bnU2RwS0y0lywIB5IBM1xTXwv+FEA3jfMQ2I2Tp7V5hIk9YMYUjM60uM6vw5pnddj69C1" +
		"Ua26jmNVse02WsJdr2Z5Vu22XcUCCCMGHMBw0IBDvtscdNfJ7PV4na8n6r5fz4ye0Lk1yOixNejdqFPJYQxHDOibJbuC6qYz" +
		"D/2BaotT9UHFYhv1qG8uwgCx5DAco4jEcpBaDgWWxzGcMOCkb9nCVhOGI5Z33MZC2+6UbyfBaWIXw3CG2I2MBDZnMZwz4Hxg" +
		"Y69YcGHL4B55EeCizunxdbi0BlkDRnybJlze5USapmcuWtjyBLiyvSu+RIarwczX6ELIGnL0NhoQ5DGIBkgv/Bf5ORQMGPNV" +
		"GIrs3ipUz1Oikh6jR1YOPMYxXDdgYik3rafSD994/DiHEI3pXTNxAN1qZ2Ju3vUWTVxZtrwWOXNNvcEk5D9eIsV4//PzM7oM" +
		"GrtjDCHlD8ZW/lZMx15oLFoNrKny/5AUCxRg8hH8IFuAuD0BetFkG2DuCbZcmu6aen0/O+DYGDsWZVi78W0wSWZJ7snQjW5G" +
		"usJoXlPH9wEQuK5OktsU+ZBYJfGWxCaJLyTI4aMMidMk8rco6eOn8zfztD90IO2LkoqamtlBujmJNqlnaubBN1pYfAfPqain" +
		"pKkT+0rA1JYzZWh++u7SSdMdGCaiDLKmltD/7//UFJ174+PXd53X3xPKwHYF7iv/ZIHO/vHNwv3O+T+MpD8F6C+9ZXk2qcAV" +
		"k/b/il3T1Nw/woh5RSkVJUUqK+VyaawgFqWxvKwoolgqFIqyWJYLkiKLCqX85fVfzBKOrE8Zo7BtznAny+wgZ/9HWXW4AQ1E" +
		"lC85tFvvY03CTWQo2jjiaI/OxfqEG0FvxOdVyKfdgFh5uDq7I/KjPGJ6B6sNV2FUu8lqRVYbrp6oti/BaCVWG87+qPY1q5VZ" +
		"bTh3e6LzJhFbLaw4nFLD0b0Oif+e7NN6Mnl1uzTi19pKgXk+44JnKbXdapL+tw9dwXvwr5dIBhrBHx+M/Q2FxT0p"
	hostile = "eNqtVDFv00AUPjupHUybpBVSRYfOQQI3dhInBkGkCHnxQAhCipCQ5TpHcHHinH1JW6ZKKAMbMDAiIVYWxMDCT0BC7GxMTPwF" +
		"7mJIzxcaVMpJ9pPP73vve+++d207kwUglwMLqwg2gBt5D/0J3Om52FVHjwKrlQf3UutIvI9AycMh8VSdMfaDWHEiuDv2g56D" +
		"4TAOI2eiK0golboyiRoTT7cPkZhAFCsIXXwn2VRQpisQnzLKdjPEeqMxWrEFjKTbNrCFKZLpK/fU88IggB72w2Gs3Ip6MIK9" +
		"m76HFXTuUgcpGJ3voFVvFMb+gRIfxhgOFLTWJWUCHI0hyk9RoYOKUG3bck59t/b+I/lDn/aJvdgEzXkv1AdhNHCxM4FRTBhY" +
		"rWtcS061NEriw4+vT2jhwlISW6B+TOJXHx038PvDARxiq1X5Fx5GlRJo7qPvIkkhLiWwznRh9xDDkLb+jPUHPsYBpBym179d" +
		"lEgWaSmHPLiRUuVO2WpdPQMBAI6aNPve3uu3VCHZpdkLTAf+z/lXFJr9y6v+3b/3fxvoxwKYFR/DyCcKeOzSWXD8ntVST0lG" +
		"q9X1hmaaNU1r1KpGtVLWjbKhmZVG1Sibhlmpm2RHn8n0zbNPdonwKM1YCpTsnCc7R8UF5vw9wqPZAdhMIVcFcNLk8UFYEW+l" +
		"gjxngyxMDh+HFeJ6Ks6GCBYHgIezSsqn4C9FwGmXx7I6KKSwFzKAVx4PZo9nOwV+wYD/LJy2LUmXf8ssc2WOlDn7WUhsI5tY" +
		"gpv9kqXkO7nBVqQEI8/8E9+fC3ds9w=="
)

func unpacked(t testing.TB, text string) []byte {
	t.Helper()
	compressed, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		t.Fatal(err)
	}
	r, err := zlib.NewReader(bytes.NewReader(compressed))
	if err != nil {
		t.Fatal(err)
	}
	data, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func read(data []byte) (*File, error) {
	return parse(bytes.NewReader(data), int64(len(data)), "x.pt", nil)
}

func values(t *testing.T, f *File, key string, first, n int) []float32 {
	t.Helper()
	v, _ := f.Root.(*pickle.Dict).Get(key)
	tensor, ok := v.(*Tensor)
	if !ok {
		t.Fatalf("%s: %#v", key, v)
	}
	x := make([]float32, n)
	if err := tensor.Float32(x, int64(first)); err != nil {
		t.Fatal(err)
	}
	return x
}

func TestRead(t *testing.T) {
	data := unpacked(t, saved)
	path := filepath.Join(t.TempDir(), "x.pt")
	if err := os.WriteFile(path, data, 0o666); err != nil {
		t.Fatal(err)
	}
	f, err := Open(path, nil)
	if err != nil {
		t.Fatal(err)
	}
	a, _ := f.Root.(*pickle.Dict).Get("a")
	if a := a.(*Tensor); !slices.Equal(a.Shape, []int{3, 4}) || a.DType != safetensors.F32 {
		t.Errorf("%+v", a)
	}
	for _, test := range []struct {
		key      string
		first, n int
		want     []float32
	}{
		{"a", 0, 12, []float32{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}}, {"a", 10, 2, []float32{10, 11}},
		{"b", 0, 2, []float32{5, 6}}, {"half", 0, 2, []float32{1.5, -2}}, {"p", 0, 1, []float32{3}},
	} {
		if got := values(t, f, test.key, test.first, test.n); !slices.Equal(got, test.want) {
			t.Errorf("%s from %d: %v, want %v", test.key, test.first, got, test.want)
		}
	}
	step, _ := f.Root.(*pickle.Dict).Get("step")
	if n, err := step.(*Tensor).Number(); n != 7 || err != nil {
		t.Errorf("%v, %v", n, err)
	}
	if size, _ := f.Root.(*pickle.Dict).Get("size"); !reflect.DeepEqual(size, pickle.Tuple{int64(2), int64(3)}) {
		t.Errorf("%v", size)
	}
	if err := a.(*Tensor).Float32(make([]float32, 2), 11); err == nil {
		t.Error("read after the end")
	}
	if err := step.(*Tensor).Float32(make([]float32, 1), 0); err == nil {
		t.Error("read integers as float32")
	}
}

func TestRefused(t *testing.T) {
	_, err := read(unpacked(t, hostile))
	var forbidden *pickle.ForbiddenError
	if !errors.As(err, &forbidden) || forbidden.Global != "posix.system" {
		t.Errorf("%v", err)
	}
	if _, err := read(unpacked(t, transposed)); err == nil || !strings.Contains(err.Error(), "only row-major") {
		t.Errorf("%v", err)
	}
	data := unpacked(t, saved)
	for n := range data { // every cut
		if _, err := read(data[:n]); err == nil {
			t.Fatalf("read the first %d bytes", n)
		}
	}
	for _, change := range []struct{ from, to, want string }{
		{"little", "bigger", "byte order"},
		{"FloatStorage", "FancyStorage", "torch.FancyStorage"},
		{"_rebuild_tensor_v2", "_rebuild_tensor_v9", "_rebuild_tensor_v9"},
		{"K\x0ctq", "K\x0dtq", "fewer than its 13 elements"}, // elements of a storage
		{"K\x05K\x02", "K\x0bK\x02", "exceeds its storage"},  // first element of b
	} {
		changed := bytes.Replace(data, []byte(change.from), []byte(change.to), 1)
		if bytes.Equal(changed, data) {
			t.Errorf("no %q", change.from)
		}
		if _, err := read(changed); err == nil || !strings.Contains(err.Error(), change.want) {
			t.Errorf("%q: %v, want %q", change.to, err, change.want)
		}
	}
}

func FuzzRead(f *testing.F) {
	f.Add(unpacked(f, saved))
	f.Add(unpacked(f, hostile))
	f.Fuzz(func(t *testing.T, data []byte) {
		file, err := read(data)
		if err != nil {
			return
		}
		if d, ok := file.Root.(*pickle.Dict); ok {
			for _, pair := range d.Pairs {
				if x, ok := pair.Value.(*Tensor); ok {
					x.Float32(make([]float32, min(x.Elements(), 100)), 0)
				}
			}
		}
	})
}
