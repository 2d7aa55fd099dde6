package comm_test

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"mula/internal/alloctest"
	"mula/xpu/comm"
)

// The number of a rank follows the documented formula, and groups have the ranks that differ only
// in their coordinates on the axes of the group.
func TestShape(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.IntRange(1, 5)
		dp, pp, ep := size.Draw(t, "expert_dp"), size.Draw(t, "pp"), size.Draw(t, "ep")
		tp := rapid.IntRange(1, 3).Draw(t, "tp")
		s := comm.NewShape(map[comm.Axes]int{comm.ExpertDP: dp, comm.PP: pp, comm.EP: ep, comm.TP: tp})
		if s.Ranks() != dp*pp*ep*tp || s.Size(comm.Data) != dp*ep*tp || s.Size(comm.PP) != pp ||
			s.Size(comm.Replicas) != dp*tp || s.Size(comm.Slices) != dp*ep {
			t.Fatalf("%s has %d ranks, %d data ranks", s, s.Ranks(), s.Size(comm.Data))
		}
		for i := range dp {
			for j := range pp {
				for k := range ep * tp {
					rank := (i*pp+j)*ep*tp + k
					if s.Index(rank, comm.ExpertDP) != i || s.Index(rank, comm.PP) != j ||
						s.Index(rank, comm.EP) != k/tp || s.Index(rank, comm.TP) != k%tp ||
						s.Index(rank, comm.Data) != i*ep*tp+k || s.Index(rank, comm.Slices) != i*ep+k/tp ||
						s.Index(rank, comm.World) != rank {
						t.Fatalf("%s: wrong coordinates of rank %d", s, rank)
					}
				}
			}
		}
		for _, axes := range []comm.Axes{comm.EP, comm.PP, comm.TP, comm.Replicas, comm.Slices, comm.Data, comm.World} {
			for rank := range s.Ranks() {
				var want []int
				for other := range s.Ranks() {
					if s.Index(other, comm.World&^axes) == s.Index(rank, comm.World&^axes) {
						want = append(want, other)
					}
				}
				group := s.Group(rank, axes)
				if !slices.Equal(group, want) || group[s.Index(rank, axes)] != rank ||
					s.At(rank, axes, s.Index(rank, axes)) != rank {
					t.Fatalf("%s: the group %s of rank %d is %v, want %v", s, axes.GroupName(), rank, group, want)
				}
			}
		}
		for _, axis := range comm.AllAxes() {
			if other := s.With(axis, 7); other.Size(axis) != 7 || other.With(axis, s.Size(axis)) != s {
				t.Fatalf("%s with 7 ranks on %s is %s", s, axis, other)
			}
		}
	})
}

func TestShapeText(t *testing.T) {
	s := comm.NewShape(map[comm.Axes]int{comm.ExpertDP: 2, comm.EP: 4})
	if got := s.String(); got != "expert_dp 2, ep 4" {
		t.Error(got)
	}
	if got := s.Product(comm.World, "layout."); got != "layout.expert_dp · layout.pp · layout.ep = 2 · 1 · 4 = 8" {
		t.Error(got)
	}
	if got := s.With(comm.PP, 3).String(); got != "expert_dp 2, pp 3, ep 4" {
		t.Error(got)
	}
	if got := s.With(comm.TP, 3).Product(comm.Data, ""); got != "expert_dp · ep · tp = 2 · 4 · 3 = 24" {
		t.Error(got)
	}
	if got := comm.Slices.String(); got != "expert_dp · ep" {
		t.Error(got)
	}
	if (comm.Shape{}).Ranks() != 1 || (comm.Shape{}) != comm.NewShape(nil) {
		t.Error("the zero shape is not one rank")
	}
}

// The communicators of a mesh connect the ranks of [comm.Shape.Group], in that order.
func TestMesh(t *testing.T) {
	s := comm.NewShape(map[comm.Axes]int{comm.ExpertDP: 2, comm.PP: 3, comm.EP: 2})
	for _, s := range []comm.Shape{s, comm.NewShape(map[comm.Axes]int{comm.ExpertDP: 2, comm.EP: 2, comm.TP: 2})} {
		testMesh(t, s)
	}
	if _, err := comm.NewMesh(t.Context(), comm.NewSingle(), s); err == nil {
		t.Error("a mesh of 12 ranks fits a world of one")
	}
}

func testMesh(t *testing.T, s comm.Shape) {
	t.Helper()
	together(t, s.Ranks(), func(ctx context.Context, world *comm.Comm) error {
		m, err := comm.NewMesh(ctx, world, s)
		if err != nil {
			return err
		}
		defer m.Close()
		second, err := m.Split(ctx, comm.EP)
		if err != nil {
			return err
		}
		check := func(group *comm.Comm, axes comm.Axes) error {
			ranks := make([]int64, s.Size(axes))
			ranks[group.Rank()] = int64(m.Rank())
			each := make([]int, len(ranks)+1)
			for i := range each {
				each[i] = i
			}
			if err := comm.AllGather(ctx, group, ranks, each); err != nil {
				return err
			}
			for i, rank := range s.Group(m.Rank(), axes) {
				if ranks[i] != int64(rank) || group.Rank() != m.OwnIndex(axes) {
					return fmt.Errorf("the group %s of rank %d has the ranks %v", axes.GroupName(), m.Rank(), ranks)
				}
			}
			return nil
		}
		for _, axes := range []comm.Axes{comm.EP, comm.PP, comm.TP, comm.Replicas, comm.Slices, comm.Data} {
			if err := check(m.Group(axes), axes); err != nil {
				return err
			}
		}
		return check(second, comm.EP)
	})
}

// A run of one rank has all groups.
func TestSingleMesh(t *testing.T) {
	m := comm.NewSingleMesh()
	defer m.Close()
	for _, group := range []*comm.Comm{m.World(), m.Group(comm.EP), m.Group(comm.PP), m.Group(comm.TP),
		m.Group(comm.Replicas), m.Group(comm.Slices), m.Group(comm.Data)} {
		if group.Size() != 1 || group.Rank() != 0 {
			t.Errorf("rank %d of %d", group.Rank(), group.Size())
		}
	}
	if m.Ranks() != 1 || m.Rank() != 0 {
		t.Errorf("rank %d of %d", m.Rank(), m.Ranks())
	}
	if n := alloctest.Least(func() { m.OwnIndex(comm.Data); m.Group(comm.Data); m.Size(comm.World) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
