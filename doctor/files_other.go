//go:build !linux && !darwin && !freebsd

package doctor

import "errors"

func usage(string) (Usage, error) { return Usage{}, errors.ErrUnsupported }
