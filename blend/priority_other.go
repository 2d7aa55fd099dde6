//go:build !linux

package blend

// lowestPriority does nothing where a thread has no priority of its own.
func lowestPriority() {}
