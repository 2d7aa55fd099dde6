package greedy

import (
	"context"
	"crypto/md5"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"testing"
)

// raw returns n numbers of a kind, as testdata/blends.py makes them.
func raw(t *testing.T, kind string, n int) []int64 {
	t.Helper()
	out, state := make([]int64, n), uint64(12345)
	for i := range out {
		state = state*6364136223846793005 + 1442695040888963407
		draw := int64(state >> 33)
		switch kind {
		case "uniform":
			out[i] = draw%100000 + 1
		case "cubes":
			v := draw%300 + 1
			out[i] = v * v * v
		case "powers":
			out[i] = 1 << (draw % 20)
		case "five":
			out[i] = draw%5 + 1
		case "equal":
			out[i] = 1
		case "zeros":
			out[i] = draw % 3 * (draw % 1000)
		case "sources":
			out[i] = []int64{60, 15, 10, 6, 5, 3, 1}[i*7/n]
		default:
			t.Fatalf("no kind %q", kind)
		}
	}
	return out
}

// TestMegatron compares with the results of Megatron-LM's helper, compiled with and without FMA.
func TestMegatron(t *testing.T) {
	text, err := os.ReadFile("testdata/blends.json")
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Cases []struct {
			Kind              string
			Datasets          int
			Samples           int64
			Exhaustive, Fused bool
			Dataset, Sample   string
		}
	}
	if err := json.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	if len(file.Cases) < 46 {
		t.Fatalf("%d cases", len(file.Cases))
	}
	for i, c := range file.Cases {
		threadCounts := []int{1, 3}
		if testing.Short() {
			threadCounts = threadCounts[i%2 : i%2+1]
		}
		for _, threads := range threadCounts {
			t.Run(fmt.Sprintf("%s/%d/exhaustive=%v/fused=%v/threads=%d", c.Kind, c.Datasets, c.Exhaustive, c.Fused,
				threads), func(t *testing.T) {
				datasets, samples := md5.New(), md5.New()
				var n int64
				emit := func(_ int64, dataset []int16, sample []int64) error {
					n += int64(len(dataset))
					if err := binary.Write(datasets, binary.LittleEndian, dataset); err != nil {
						return err
					}
					return binary.Write(samples, binary.LittleEndian, sample)
				}
				values := raw(t, c.Kind, c.Datasets)
				var err error
				if c.Exhaustive {
					err = Exhaustive(context.Background(), values, c.Fused, nil, threads, emit)
				} else {
					var total float64
					for _, v := range values {
						total += float64(v)
					}
					weights := make([]float64, len(values))
					for i, v := range values {
						weights[i] = float64(v) / total
					}
					_, err = Weighted(context.Background(), Rule{Weights: weights, Fused: c.Fused}, c.Samples, nil,
						threads, emit)
				}
				if err != nil {
					t.Fatal(err)
				}
				if n != c.Samples {
					t.Fatalf("%d samples, want %d", n, c.Samples)
				}
				if got := hex.EncodeToString(datasets.Sum(nil)); got != c.Dataset {
					t.Errorf("datasets have MD5 %s, want %s", got, c.Dataset)
				}
				if got := hex.EncodeToString(samples.Sum(nil)); got != c.Sample {
					t.Errorf("samples have MD5 %s, want %s", got, c.Sample)
				}
			})
		}
	}
}
