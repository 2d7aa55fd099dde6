//go:build !linux

package main

// inMemory returns "": there is no file system in memory that every machine has.
func inMemory() (folder string, err error) { return "", nil }
