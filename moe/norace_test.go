//go:build !race

package moe

const raceDetector = false
