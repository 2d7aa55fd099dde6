//go:build !linux

package blend

// lowestPriority does nothing, because threads of this system have no priority of their own.
func lowestPriority() {}
