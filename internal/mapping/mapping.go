// Package mapping maps files into memory for reading.
//
// A mapping costs memory only for what was read of it lately, and that the system can take back at any time. A disk that fails under it, or a
// file that is cut short while it is mapped, ends the process: there is no call to return an error from.
package mapping

import "io/fs"

// A File is a file mapped for reading. The zero File is one without bytes, and closed.
type File struct {
	Data []byte      // its bytes, nothing to write to; nil if it has none
	Info fs.FileInfo // as it was when it was opened
}
