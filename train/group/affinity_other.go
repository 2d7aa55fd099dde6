//go:build !linux

package group

// processors names the processors on which this process may run, "" if unknown.
func processors() string { return "" }
