//go:build unix && !linux

package launch

import "syscall"

func endWithParent(*syscall.SysProcAttr) {}

// descendants returns nothing: this system does not list them.
func descendants(int) []int { return nil }
