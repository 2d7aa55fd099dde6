// Package blend fixes one order of samples from many sources, and reads the samples in this order.
//
// A [Config] (blend.yaml) names sources, weights and stages. [Seal] builds a [Plan] (plan.json)
// from it. The plan fixes every batch of a run: it maps a position to a source and a window, and
// back, without an index file. [Open] opens the plan's shards as [Data]. Data locates samples,
// decodes them ([Data.Peek]) and finds documents ([Data.Where]). Package [mula/blend/stream]
// streams Data as Arrow record batches, and computes fingerprints of batches. Package
// [mula/blend/fingerprint] compares the fingerprint logs of two runs.
//
// The order depends only on the plan. It does not depend on the number of ranks or goroutines, or
// on the position at which a reader starts.
//
// docs/formats/plan.md specifies the plan and the order, docs/formats/fingerprints.md the
// fingerprints. The package runs on little-endian machines, as does all of mula.
package blend
