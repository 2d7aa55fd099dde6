package checkpoint

import "testing"

// The message of a run that resumes with another optimizer or schedule names this difference, and
// not every field of the old one.
func TestAnotherOptimizerIsOneDifference(t *testing.T) {
	was := map[string]string{"optimizer.name": `"adamw"`, "optimizer.decay": `"torch"`, "optimizer.eps": "1e-08",
		"optimizer.betas": "[0.9,0.95]", "seed": "1"}
	now := map[string]string{"optimizer.name": `"sophiag"`, "optimizer.rho": "0.04", "optimizer.betas": "[0.9,0.95]",
		"seed": "1"}
	err := State{Config: was, Step: 4}.CheckConfig(now, nil)
	want := `cannot resume: train.yaml differs from the checkpoint: optimizer.name was "adamw" and is now "sophiag"; restore the old values, or set another output to start a new run`
	if err == nil || err.Error() != want {
		t.Errorf("%v\nwant %s", err, want)
	}
}
