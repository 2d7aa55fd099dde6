package moe_test

import (
	"context"
	"fmt"
	"log"

	"mula/moe"
	"mula/xpu"
	"mula/xpu/cpu"
)

func Example() {
	cfg, err := moe.Preset("mula-nano")
	if err != nil {
		log.Fatal(err)
	}
	dev := cpu.New(0, xpu.FP32)
	defer dev.Close()
	m, err := moe.New(cfg, dev)
	if err != nil {
		log.Fatal(err)
	}
	m.Init(6198)
	stats, err := m.Backward(context.Background(), moe.Batch{Tokens: []uint32{3, 1, 4, 1, 5, 9, 2, 6, 5, 3}, Rows: 2,
		SequenceLength: 4}, moe.BackwardOptions{
		Loss: moe.LossOptions{Aux: moe.AuxMegaBlocks, AuxCoefficient: 0.01, ZCoefficient: 0.001},
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("%d targets, %.1f nats each; %d parameters, first %s %v\n", stats.Targets,
		stats.Loss/float64(stats.Targets),
		cfg.TotalParameters(), m.Parameters()[0].Name, m.Parameters()[0].Shape)
	// Output: 8 targets, 6.3 nats each; 198208 parameters, first model.embed_tokens.weight [512 64]
}
