package opencl

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"mula/internal/atomicfile"
	"mula/internal/filesystem"
	"mula/internal/usercache"
)

// A Cache is a folder of compiled programs, one file each, which processes may share. A file name
// is the SHA-256 of everything that its content depends on: source and options, device, driver,
// platform, and their versions. A file contains
//
//	"mula opencl 1\n" | that SHA-256 | SHA-256 of the rest | the driver's binary
//
// and is written atomically. Any other file is ignored.
type Cache struct {
	folder string
	disk   atomicfile.Files
}

const (
	cacheMagic  = "mula opencl 1\n"
	cacheSuffix = ".program"
	cacheHead   = len(cacheMagic) + 2*sha256.Size
)

type cacheKey [sha256.Size]byte

// NewCache returns the cache in a folder, which is created when the first program is stored.
func NewCache(folder string) *Cache { return &Cache{folder: folder} }

// UserCache returns the user's cache, mula/opencl in the user's cache folder (XDG_CACHE_HOME, or
// .cache in HOME). It fails if there is no such folder.
func UserCache() (*Cache, error) {
	folder, err := usercache.Folder("opencl")
	if err != nil {
		return nil, fmt.Errorf("opencl: no cache folder for compiled programs: %w", err)
	}
	return NewCache(folder), nil
}

// cacheKey returns the key of a program on the device.
func (d *Device) cacheKey(s Source) cacheKey {
	h := sha256.New()
	for _, text := range []string{cacheMagic, d.Platform, d.platformVersion, d.Name, d.Vendor, d.Version,
		d.DriverVersion, s.Options, s.Text} {
		var length [8]byte
		binary.LittleEndian.PutUint64(length[:], uint64(len(text)))
		h.Write(length[:])
		io.WriteString(h, text)
	}
	return cacheKey(h.Sum(nil))
}

func (c *Cache) path(key cacheKey) string {
	return filepath.Join(c.folder, hex.EncodeToString(key[:])+cacheSuffix)
}

// load returns the stored binary, or nil.
func (c *Cache) load(key cacheKey) []byte {
	f, err := filesystem.Open(c.disk.FS(), c.path(key))
	if err != nil {
		return nil
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() || info.Size() > maxAnswer {
		return nil
	}
	data, err := io.ReadAll(f)
	if err != nil || len(data) <= cacheHead || string(data[:len(cacheMagic)]) != cacheMagic {
		return nil
	}
	sums, content := data[len(cacheMagic):cacheHead], data[cacheHead:]
	if cacheKey(sums) != key || sha256.Sum256(content) != [sha256.Size]byte(sums[sha256.Size:]) {
		return nil
	}
	return content
}

// store stores a binary and replaces an existing one.
func (c *Cache) store(key cacheKey, content []byte) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("opencl: cannot cache a compiled program: %w", err)
		}
	}()
	if err := os.MkdirAll(c.folder, 0o700); err != nil {
		return err
	}
	if _, err := c.disk.Clean(c.folder); err != nil {
		return err
	}
	sum := sha256.Sum256(content)
	data := append([]byte(cacheMagic), key[:]...)
	data = append(append(data, sum[:]...), content...)
	return c.disk.WriteFile(c.path(key), data)
}
