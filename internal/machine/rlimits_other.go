//go:build !linux && !darwin && !freebsd

package machine

func (l *Limits) readResourceLimits() {}
