//go:build race

package moe

// raceDetector says that the race detector is on, which slows plain loops by a factor of ten.
const raceDetector = true
