//go:build unix

package serve

import (
	"errors"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	"mula/shards"
)

// A shard that is cut short while the service has it open ends the streams that read it, and no
// other. After the shard is restored by renaming, the streams work again without a restart of the
// service.
func TestServiceGoesOnWithRestoredShard(t *testing.T) {
	dir := t.TempDir()
	makePlan(t, dir, shards.UInt16, 40000)
	data := openFolder(t, dir)
	s := serveData(t, data, Options{})
	read := func(step int64) (rows int64, err error) {
		t.Helper()
		r, err := s.client.Get(fmt.Sprintf("http://localhost/v1/stream?batch_size=4&step=%d", step))
		if err != nil {
			t.Fatal(err)
		}
		r.Body.Close()
		if r.StatusCode != http.StatusOK {
			return 0, errors.New(r.Status)
		}
		records, body := s.open(fmt.Sprintf("batch_size=4&step=%d", step))
		defer body.Close()
		defer records.Release()
		for records.Next() {
			for _, got := range rowsOf(records.RecordBatch()) {
				if want, ok := expected(t, data, got.position); !ok || !sameRow(got, want) {
					t.Errorf("position %d: %+v", got.position, got)
				}
				rows++
			}
		}
		return rows, records.Err()
	}
	all, err := read(0)
	if err != nil || all == 0 {
		t.Fatal(all, err)
	}
	if status, answer := s.get("/v1/health"); status != http.StatusOK || answer["status"] != "ok" {
		t.Errorf("before the damage: %d %v", status, answer)
	}
	path := data.ShardPath(1, 0) + ".bin"
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(path, 0); err != nil {
		t.Fatal(err)
	}
	if n, err := read(0); err == nil || n >= all {
		t.Errorf("cut: %d of %d rows, %v", n, all, err)
	}
	status, answer := s.get("/v1/health")
	damage := fmt.Sprint(answer["damage"])
	if status != http.StatusInternalServerError || !strings.Contains(damage, path) ||
		!strings.Contains(damage, "cut short") {
		t.Errorf("/v1/health: %d %v", status, answer)
	}
	if err := errors.Join(os.WriteFile(path+".restored", whole, 0o666), os.Rename(path+".restored", path)); err != nil {
		t.Fatal(err)
	}
	if n, err := read(0); err != nil || n != all {
		t.Errorf("restored: %d of %d rows, %v", n, all, err)
	}
	if status, answer := s.get("/v1/health"); status != http.StatusOK || answer["status"] != "ok" {
		t.Errorf("/v1/health when all is restored: %d %v", status, answer)
	}
}
