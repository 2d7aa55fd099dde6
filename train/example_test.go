package train_test

import (
	"fmt"

	"mula/train"
	"mula/train/optimizer"
)

func ExampleSchedule_LearningRate() {
	s := optimizer.Schedule{Peak: 4e-4, Min: 4e-5, Warmup: 2, Decay: 6}
	for step := range int64(7) {
		fmt.Printf("%d %.2e\n", step, s.LearningRate(step))
	}
	// Output:
	// 0 2.00e-04
	// 1 4.00e-04
	// 2 3.47e-04
	// 3 2.20e-04
	// 4 9.27e-05
	// 5 4.00e-05
	// 6 4.00e-05
}

func ExampleParseConfig() {
	_, err := train.ParseConfig([]byte("batch_size: 64\nwarmup_steps: 100\n"), "train.yaml")
	fmt.Println(err)
	// Output: train.yaml:2: unknown field "warmup_steps"; did you mean "schedule.warmup_steps"?
}
