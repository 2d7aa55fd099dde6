//go:build !linux

package verifier

// lowestPriority does nothing, because threads of this system have no priority of their own.
func lowestPriority() {}
