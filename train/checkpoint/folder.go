package checkpoint

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"mula/internal/locks"
	"mula/internal/objects"
	"mula/moe"
)

// folderLock is the lock of a folder in a store that a process writes.
const folderLock = "export" + locks.Suffix

// removeTime is how long the objects of a failed export are removed at most.
const removeTime = 10 * time.Second

// newFolder writes a model to a new folder of an object store. write must create config.json last:
// a folder without it has no model. newFolder fails if the folder has objects, or if another
// process is writing them. A killed process leaves its lock, and newFolder removes its objects.
func newFolder(ctx context.Context, url string, write func(create moe.Creator) error) error {
	url = strings.TrimRight(url, "/")
	left, interrupted, err := leftovers(ctx, url)
	if err == nil && len(left) > 0 && !interrupted {
		err = errExists
	}
	if err != nil {
		return err
	}
	set, err := locks.Open(ctx, nil, url, locks.DefaultTiming)
	if err != nil {
		return err
	}
	defer set.Close()
	lock, err := lockFolder(ctx, set, url, interrupted)
	if err != nil {
		return err
	}
	beating, stop := context.WithCancel(ctx)
	defer stop()
	go set.Beat(beating)

	left, _, err = leftovers(ctx, url) // again, because another process may have written some meanwhile
	if err == nil && len(left) > 0 && !interrupted {
		err = errExists
	}
	if err != nil {
		lock.Release()
		return err
	}
	if err = removeObjects(ctx, url, left); err == nil {
		err = write(func(name string) (moe.SavedFile, error) {
			w, err := objects.Create(ctx, objects.Join(url, name))
			return &storedFile{w, lock}, err
		})
	}
	if err == nil {
		lock.Release()
		return nil
	}
	// A lock that stays tells the next export that the objects are to be removed.
	if ctx.Err() == nil && lock.Ours() {
		ctx, cancel := context.WithTimeout(ctx, removeTime)
		defer cancel()
		failed := removeObjects(ctx, url, []string{modelConfig}) // its response may have been lost
		if failed == nil {
			left, _, failed = leftovers(ctx, url)
		}
		if failed == nil && removeObjects(ctx, url, left) == nil {
			lock.Release()
		}
	}
	return err
}

// lockFolder locks a folder. If there is a lock, it waits until it is known whether that is stale.
func lockFolder(ctx context.Context, set *locks.Set, url string, locked bool) (*locks.Lock, error) {
	path := objects.Join(url, folderLock)
	var lock *locks.Lock
	var holder string
	var err error
	if locked {
		holder, err = set.Holder(ctx, path, time.Second)
	}
	if err == nil && holder == "" {
		lock, holder, err = set.Acquire(path)
	}
	if err == nil && lock == nil {
		err = fmt.Errorf("%s is writing this folder; wait for it, or name another folder", holder)
	}
	return lock, err
}

// weightsName matches the names of files of weights.
var weightsName = regexp.MustCompile(`^model(-\d+-of-\d+)?\.safetensors(\.index\.json)?$`)

// leftovers returns the names of the objects in a folder, and whether it is locked. The error is
// [errExists] if it has a model, or an object that no export writes.
func leftovers(ctx context.Context, url string) (names []string, locked bool, err error) {
	for e, err := range objects.List(ctx, url+"/") {
		if err != nil {
			return nil, false, err
		}
		switch name := strings.TrimPrefix(e.URL, url+"/"); {
		case name == "": // other programs mark folders by such objects
		case name == folderLock:
			locked = true
		case !weightsName.MatchString(name) && !slices.Contains(companions, name):
			return nil, false, errExists
		default:
			names = append(names, name)
		}
	}
	return names, locked, nil
}

func removeObjects(ctx context.Context, url string, names []string) error {
	for _, name := range names {
		if err := objects.Remove(ctx, objects.Join(url, name)); err != nil {
			return err
		}
	}
	return nil
}

// A storedFile is an object of a folder that this process has locked.
type storedFile struct {
	*objects.Writer
	lock *locks.Lock
}

// Publish makes the object appear.
func (f *storedFile) Publish() error {
	if !f.lock.Ours() {
		return errors.New("the lock of the folder cannot be read, or another process has taken it over; repeat the " +
			"command")
	}
	return f.Close()
}
