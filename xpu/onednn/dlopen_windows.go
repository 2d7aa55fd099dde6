package onednn

import "errors"

// anywhere stands for all libraries that the process has loaded.
const anywhere = 0

var errWindows = errors.New("shared libraries are not opened on Windows, only on Linux and macOS")

func openFile(string) (uintptr, error) { return 0, errWindows }

func symbol(uintptr, string) (uintptr, error) { return 0, errWindows }
