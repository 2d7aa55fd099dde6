//go:build !linux

package train

// processors names those that this process may run on, "" if it is not known.
func processors() string { return "" }
