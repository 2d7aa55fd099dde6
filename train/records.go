package train

import (
	"mula/train/spikes"

	"mula/train/record"
)

// ResumeRecord names the checkpoint that a run resumed from.
type ResumeRecord struct {
	Checkpoint string              `json:"checkpoint"`
	Time       string              `json:"time"`
	PeakFLOPS  float64             `json:"peak_flops"`        // as in RunRecord, measured again
	Refused    []RefusedCheckpoint `json:"refused,omitempty"` // damaged newer checkpoints
	// fingerprint of the checkpoint's plan, if it differs and plan_change is accept
	OldPlan string `json:"old_plan,omitempty"`
	Plan    string `json:"plan,omitempty"` // fingerprint of the new plan
}

// metricsLine is a line of metrics.jsonl that is not a step.
type metricsLine struct {
	Run      *record.Run        `json:"run,omitempty"`
	Step     *int64             `json:"step,omitempty"`
	Eval     *record.Evaluation `json:"eval,omitempty"`
	Resumed  *ResumeRecord      `json:"resumed,omitempty"`
	Rollback *spikes.Rollback   `json:"rollback,omitempty"` // before the first step whose data it skips
}
