//go:build unix

package batches

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// controlBytes is the size of a control message with the descriptors of all slots.
var controlBytes = unix.CmsgSpace(4 * maxSlots)

// filesOf returns the files whose descriptors are in control messages.
func filesOf(control []byte) (files []*os.File, err error) {
	messages, err := unix.ParseSocketControlMessage(control)
	if err != nil {
		return nil, fmt.Errorf("descriptors of files: %w", err)
	}
	for _, m := range messages {
		descriptors, err := unix.ParseUnixRights(&m)
		if err != nil {
			return nil, fmt.Errorf("descriptors of files: %w", err)
		}
		for _, d := range descriptors {
			files = append(files, os.NewFile(uintptr(d), "shared memory"))
		}
	}
	return files, nil
}
