//go:build race

package onednn

// raceDetector says that the race detector is on, under which a sync.Pool, as purego has one,
// forgets things.
const raceDetector = true
