//go:build !linux

package machine

// ReadLimits returns the limits of this process.
func ReadLimits() Limits {
	l := unlimited()
	l.readResourceLimits()
	return l
}
