package collective

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"
	"testing"

	"mula/train/optimizer/optimizertest"
	"mula/xpu/comm"
)

// Gather returns the values of all ranks in order. Agree fails on all ranks if one has failed.
func TestGather(t *testing.T) {
	t.Parallel()
	broken := errors.New("disk full")
	optimizertest.Together(t, 7, func(world *comm.Comm) error {
		rank := world.Rank()
		words, err := Gather(context.Background(), world, strings.Repeat("x", rank))
		if err != nil {
			return err
		}
		for i, w := range words {
			if w != strings.Repeat("x", i) {
				return fmt.Errorf("rank %d sent %q", i, w)
			}
		}
		if _, err := Gather(context.Background(), world, map[string]any{"f": func() {}}); err == nil {
			return errors.New("a function was gathered, although JSON has none")
		}
		first := rank + 7
		if err := Broadcast(context.Background(), world, &first); err != nil || first != 7 {
			return fmt.Errorf("rank 0 sent %d: %w", first, err)
		}
		world.ResetTraffic()
		if err := Agree(context.Background(), world, nil); err != nil {
			return err
		}
		for _, sent := range world.Traffic() { // only the number of failed ranks is sent
			if sent.Operation != comm.OpAllReduce && sent.Calls > 0 || sent.Bytes() > 2*8*6 {
				return fmt.Errorf("to agree on nothing, a rank sends %d bytes by %s", sent.Bytes(), sent.Operation)
			}
		}
		var own error
		if rank%2 == 0 || rank > 4 {
			own = fmt.Errorf("writing: %w", broken)
		}
		err = Agree(context.Background(), world, own)
		if err == nil || errors.Is(err, broken) != (own != nil) ||
			!strings.Contains(err.Error(), "rank 2 on "+Hostname()+": writing: disk full") {
			return fmt.Errorf("agreed on %w", err)
		}
		if shown, more := strings.Count(err.Error(), "disk full"), strings.Contains(err.Error(),
			"and 1 more ranks"); shown != 4 && shown != 5 || more != (shown == 4) {
			return fmt.Errorf("agreed on %w", err)
		}
		return nil
	})
	if err := Agree(context.Background(), comm.NewSingle(), fs.ErrExist); err != fs.ErrExist {
		t.Errorf("one rank: %v", err)
	}
}

// Decide returns to each rank its answer. Only rank 0 sees all questions, and only it and the first
// ranks of sections send the messages of others. An error of rank 0, an invalid question, and an
// invalid answer fail on all ranks.
func TestDecide(t *testing.T) {
	t.Parallel()
	for _, n := range []int{1, 2, 7, 16, 17} {
		optimizertest.Together(t, n, func(world *comm.Comm) error {
			ctx, rank, section := context.Background(), world.Rank(), Section(n)
			question, called := strings.Repeat("q", 1000+rank), false
			world.ResetTraffic()
			answer, err := Decide(ctx, world, question, func(all []string) (answers []string, err error) {
				called = true
				for r, q := range all {
					if len(q) != 1000+r {
						return nil, fmt.Errorf("rank %d asked %d bytes", r, len(q))
					}
					answers = append(answers, fmt.Sprint("answer ", r))
				}
				return answers, nil
			})
			if err != nil || answer != fmt.Sprint("answer ", rank) || called != (rank == 0) {
				return fmt.Errorf("answer %q, decided here: %v, %w", answer, called, err)
			}
			for _, sent := range world.Traffic() {
				if most := int64(1100); rank%section > 0 && sent.Bytes() > most {
					return fmt.Errorf("rank %d sends %d bytes, want at most %d", rank, sent.Bytes(), most)
				}
			}
			full := errors.New("disk full")
			_, err = Decide(ctx, world, rank, func([]int) ([]int, error) { return nil, full })
			if err == nil || err.Error() != "disk full" || n > 1 && !Shared(err) ||
				rank == 0 && !errors.Is(err, full) {
				return fmt.Errorf("a failed decision: %w", err)
			}
			var function any
			if rank == n-1 {
				function = func() {}
			}
			_, err = Decide(ctx, world, function, func(all []any) ([]any, error) { return all, nil })
			if err == nil ||
				rank < n-1 && !strings.Contains(err.Error(), fmt.Sprint("invalid message from rank ", n-1)) {
				return fmt.Errorf("a question that JSON does not have: %w", err)
			}
			_, err = Decide(ctx, world, rank, func(all []int) ([]any, error) {
				answers := make([]any, len(all))
				answers[len(all)-1] = func() {}
				return answers, nil
			})
			if err == nil || !strings.Contains(err.Error(), "unsupported type") {
				return fmt.Errorf("an answer that JSON does not have: %w", err)
			}
			return nil
		})
	}
}
