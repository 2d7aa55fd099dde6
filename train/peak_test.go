package train

import (
	"context"
	"errors"
	"testing"
	"time"
)

// The measurement is short whatever the run, and shorter for a short one.
func TestMeasurePeak(t *testing.T) {
	d := device(t, 1)
	for _, work := range []float64{0, 1e6, 1e10, 1e20} {
		begin := time.Now()
		peak, err := measurePeak(context.Background(), d, work)
		if err != nil || !(peak > 1e6) || !(peak < 1e15) {
			t.Errorf("for %g FLOP: peak %g, %v", work, peak, err)
		}
		// Ten times what it may take, for a machine that is busy.
		if took := time.Since(begin); took > 10*peakTime {
			t.Errorf("for %g FLOP: took %v", work, took)
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := measurePeak(ctx, d, 1e20); !errors.Is(err, context.Canceled) {
		t.Errorf("a done context: %v", err)
	}
}
