// Package verify opens the fingerprint logs that `mula verify` compares, and finds the plan that
// explains the amendments between them.
package verify

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"mula/blend"
	"mula/blend/fingerprint"
	"mula/internal/quantity"
	"mula/train"
)

// A Log is the fingerprint log, or the logs of all ranks or of all plans of a run, that an operand
// of `mula verify` names.
type Log struct {
	Name   string // the operand
	Header fingerprint.Header
	Steps  fingerprint.Steps
	Run    *fingerprint.RunLog // Steps, of a run that has changed its plan; else nil
	Plans  []string            // of the log, or of all logs of the run, the newest first
	Note   string              // note about logs that the operand does not include, or ""

	client *fingerprint.ClientLog // the logs of a folder of the Python client; else nil
	files  []*os.File
}

// Close closes the files.
func (l *Log) Close() {
	if l.client != nil {
		l.client.Close()
	}
	for _, f := range l.files {
		f.Close()
	}
}

// olderRunLogs is a pattern for a run's logs of earlier plans.
var olderRunLogs = fingerprint.OlderLogFile(strings.Repeat("?", 16))

// OpenLog opens the log, or the logs, of an operand: files separated by commas, or a folder.
func OpenLog(operand string) (l *Log, err error) {
	l = &Log{Name: operand}
	defer func() {
		if err != nil {
			l.Close()
			l = nil
		}
	}()
	var readers []*fingerprint.Reader
	open := func(path string) error {
		f, err := os.Open(path)
		if err != nil {
			return fmt.Errorf("opening a fingerprint log: %w", err)
		}
		l.files = append(l.files, f)
		r, err := fingerprint.NewReader(f, path)
		if err != nil {
			if _, notPlan := blend.ReadPlan(path); notPlan == nil {
				return fmt.Errorf("%s is a plan: mula hash --plan %s --batch-size B --output expected.jsonl writes "+
					"its log, and --plan %s explains amendments", path, path, path)
			}
			return err
		}
		readers = append(readers, r)
		if !slices.Contains(l.Plans, r.Header.Plan) {
			l.Plans = append(l.Plans, r.Header.Plan)
		}
		return nil
	}
	paths := strings.Split(operand, ",")
	for _, path := range paths {
		info, err := os.Stat(path)
		folder := err == nil && info.IsDir()
		if folder {
			if ofClient, err := l.openClient(path, len(paths)); ofClient || err != nil {
				return l, err
			}
			path = filepath.Join(path, fingerprint.LogFile)
		}
		older, err := olderLogs(path)
		if err != nil {
			return l, err
		}
		if err := open(path); err != nil {
			if folder && len(older) > 0 && errors.Is(err, fs.ErrNotExist) {
				err = fmt.Errorf("%w; the folder has only logs of earlier plans, such as %s; start "+
					"the run again, or name that log", err, older[0])
			}
			return l, err
		}
		switch {
		case len(older) == 0:
		case !folder:
			l.Note = fmt.Sprintf("%s is the log of one plan of its run; %s also has %s. Name the folder to "+
				"compare the complete run", path, filepath.Dir(path),
				quantity.Plural(int64(len(older)), "older log"))
		case len(paths) > 1:
			return l, fmt.Errorf("%s has the logs of several plans of a run, and cannot be combined with "+
				"other logs; use it alone", filepath.Dir(path))
		default:
			for _, path := range older {
				if err := open(path); err != nil {
					return l, err
				}
			}
			l.Run, l.Header, err = fingerprint.Join(readers)
			l.Steps = l.Run
			return l, err
		}
	}
	l.Steps, l.Header, err = fingerprint.Combine(readers)
	return l, err
}

// openClient opens the logs of the Python client in a folder, if it has such logs and none of `mula
// train`. operands is the number of paths of the operand.
func (l *Log) openClient(folder string, operands int) (bool, error) {
	if _, err := os.Stat(filepath.Join(folder, fingerprint.LogFile)); !errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	log, header, err := fingerprint.OpenClientLog(folder)
	switch {
	case err != nil:
		return true, err
	case log == nil:
		older, err := fs.Glob(os.DirFS(folder), olderRunLogs)
		if err != nil || len(older) > 0 {
			return false, err
		}
		return true, fmt.Errorf("%s: no fingerprint log in the folder; expected %s of `mula train` or logs "+
			"of the Python client, such as 0000000000000000-batch32-rank0of1.jsonl",
			folder, fingerprint.LogFile)
	case operands > 1:
		return true, fmt.Errorf("%s has the Python client's logs of all ranks of a run; give it "+
			"alone", folder)
	}
	l.client, l.Steps, l.Header, l.Plans = log, log, header, log.Plans
	return true, nil
}

// olderLogs returns the logs of earlier plans next to the newest log of a run.
func olderLogs(path string) ([]string, error) {
	if filepath.Base(path) != fingerprint.LogFile {
		return nil, nil
	}
	folder := filepath.Dir(path)
	names, err := fs.Glob(os.DirFS(folder), olderRunLogs)
	for i := range names {
		names[i] = filepath.Join(folder, names[i])
	}
	return names, err
}

// Amendments returns the amendments between the oldest and the newest of some plans. plan amends
// these plans or is one of them. found is the number of these plans among plan and its ancestors.
func Amendments(plan *blend.Plan, fingerprints []string) (list []blend.Parent, found int) {
	first, last := len(plan.Parents)+1, -1
	for _, fingerprint := range fingerprints {
		at := slices.IndexFunc(plan.Parents, func(p blend.Parent) bool { return p.Fingerprint == fingerprint })
		switch {
		case plan.Has(fingerprint):
			at = len(plan.Parents)
		case at < 0:
			continue
		}
		found++
		first, last = min(first, at), max(last, at)
	}
	if first > last {
		return nil, 0
	}
	return plan.Parents[first:last], found
}

// NewestPlan finds the plan of one of the logs that amends the plans of all other logs: the plan
// that the train.yaml of a run names, or plan.json next to a log. why describes where it was found.
// plan is nil if there is no such plan, or if all logs have the same plan.
func NewestPlan(fingerprints, operands []string) (plan *blend.Plan, file, why string) {
	different := slices.Compact(slices.Sorted(slices.Values(fingerprints)))
	if len(different) < 2 {
		return nil, "", ""
	}
	for _, operand := range operands {
		for _, path := range strings.Split(operand, ",") {
			folder := filepath.Dir(path)
			if info, err := os.Stat(path); err == nil && info.IsDir() {
				folder = path
			}
			type candidate struct{ file, why string }
			candidates := []candidate{{filepath.Join(folder, "plan.json"), "which is next to the log"}}
			names := filepath.Join(folder, "train.yaml")
			if config, err := train.LoadConfig(names); err == nil {
				candidates = slices.Insert(candidates, 0, candidate{config.Plan, fmt.Sprintf("which %s names", names)})
			}
			for _, c := range candidates {
				plan, err := blend.ReadPlan(c.file)
				if err != nil {
					continue // the user has not named it
				}
				if _, found := Amendments(plan, different); found == len(different) {
					return plan, c.file, c.why
				}
			}
		}
	}
	return nil, "", ""
}
