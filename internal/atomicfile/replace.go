package atomicfile

import (
	"fmt"
	"os"
	"strings"
)

// ReplaceBetween replaces what a text file has between two marks, whole lines.
func ReplaceBetween(path, begin, end, text string) error {
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	before, rest, ok := strings.Cut(string(data), begin)
	_, after, closed := strings.Cut(rest, end)
	if !ok || !closed {
		return fmt.Errorf("%s: no marks; add the lines %q and %q", path, strings.TrimSpace(begin),
			strings.TrimSpace(end))
	}
	return WriteFile(path, []byte(before+begin+text+end+after))
}
