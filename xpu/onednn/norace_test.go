//go:build !race

package onednn

const raceDetector = false
