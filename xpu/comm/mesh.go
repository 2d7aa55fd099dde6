package comm

import (
	"context"
	"fmt"
	"math/bits"
	"strings"
)

// Axes is a set of axes of a [Mesh]. It names a group: the ranks that differ only in their
// coordinates on these axes.
type Axes uint8

// The axes. The coordinate on the last axis changes fastest with the number of a rank:
//
//	rank = ((expert_dp·PP + pp)·EP + ep)·TP + tp
const (
	ExpertDP Axes = 1 << iota // replicas of every expert
	PP                        // stages of the pipeline
	EP                        // ranks that share the experts of a layer
	TP                        // ranks that share matrices of a layer

	axisCount = iota
)

// axisNames has the names of the axes in configurations, in the order of the axes.
var axisNames = [axisCount]string{"expert_dp", "pp", "ep", "tp"}

// Groups of several axes, and of one axis under another name.
const (
	Replicas = ExpertDP | TP // ranks with the same experts
	Slices   = ExpertDP | EP // ranks with the same slices of the matrices that [TP] shares
	Data     = Replicas | EP // ranks with the same replicated weights; each has its own tokens
	World    = Axes(1<<axisCount - 1)
)

// groupNames has the names of the groups that a [Mesh] has, apart from the world.
var groupNames = map[Axes]string{EP: "experts", Replicas: "replicas", Data: "data", PP: "pipeline",
	TP: "tensor", Slices: "slices"}

// AllAxes lists the axes.
func AllAxes() []Axes { return World.list() }

func (a Axes) list() []Axes {
	var list []Axes
	for axis := Axes(1); axis <= a; axis <<= 1 {
		if a&axis != 0 {
			list = append(list, axis)
		}
	}
	return list
}

// String returns the names of the axes, as in "expert_dp · ep".
func (a Axes) String() string {
	var names []string
	for _, axis := range a.list() {
		names = append(names, axisNames[bits.TrailingZeros8(uint8(axis))])
	}
	return strings.Join(names, " · ")
}

// GroupName returns the name of the group: experts, replicas, data, pipeline, tensor, slices or
// world. Other groups have the names of their axes.
func (a Axes) GroupName() string {
	if a == World {
		return "world"
	}
	if name := groupNames[a]; name != "" {
		return name
	}
	return a.String()
}

// MarshalText returns the name of the group.
func (a Axes) MarshalText() ([]byte, error) { return []byte(a.GroupName()), nil }

// A Shape has the number of ranks on each axis of a [Mesh]. The zero value is one rank.
type Shape struct{ more [axisCount]int } // ranks after the first one

// NewShape returns the shape with the given number of ranks on each axis, at least 1. An axis that
// is missing has one rank.
func NewShape(sizes map[Axes]int) Shape {
	var s Shape
	for axis, n := range sizes {
		s = s.With(axis, n)
	}
	return s
}

// With returns the shape with n ranks on one axis.
func (s Shape) With(axis Axes, n int) Shape {
	s.more[bits.TrailingZeros8(uint8(axis))] = n - 1
	return s
}

// Size returns the number of ranks of a group.
func (s Shape) Size(group Axes) int {
	n := 1
	for i, more := range s.more {
		if group&(1<<i) != 0 {
			n *= more + 1
		}
	}
	return n
}

// Ranks returns the number of all ranks.
func (s Shape) Ranks() int { return s.Size(World) }

// Index returns the number of a rank in its group. For a group of one axis it is the coordinate of
// the rank. Otherwise the index is computed from the coordinates like the number of a rank.
func (s Shape) Index(rank int, group Axes) int {
	index, factor := 0, 1
	for i := axisCount - 1; i >= 0; i-- {
		n := s.more[i] + 1
		if group&(1<<i) != 0 {
			index += rank % n * factor
			factor *= n
		}
		rank /= n
	}
	return index
}

// At returns the rank with the given number in a rank's group, the inverse of [Shape.Index].
func (s Shape) At(rank int, group Axes, index int) int {
	at, stride := 0, 1
	for i := axisCount - 1; i >= 0; i-- {
		n := s.more[i] + 1
		if group&(1<<i) != 0 {
			at += index % n * stride
			index /= n
		} else {
			at += rank % n * stride
		}
		rank /= n
		stride *= n
	}
	return at
}

// Group returns the ranks of a rank's group, in ascending order.
func (s Shape) Group(rank int, group Axes) []int {
	ranks := make([]int, s.Size(group))
	for i := range ranks {
		ranks[i] = s.At(rank, group, i)
	}
	return ranks
}

// String describes the shape, as in "expert_dp 2, pp 3, ep 4". An axis of one rank other than
// [ExpertDP] and [EP] is not mentioned.
func (s Shape) String() string {
	var sizes []string
	for _, axis := range AllAxes() {
		if n := s.Size(axis); n > 1 || axis&(ExpertDP|EP) != 0 {
			sizes = append(sizes, fmt.Sprintf("%s %d", axis, n))
		}
	}
	return strings.Join(sizes, ", ")
}

// Product describes the size of a group as a product, as in "expert_dp · ep = 2 · 4 = 8". Each name
// gets the prefix. [TP] is not mentioned if it has one rank.
func (s Shape) Product(group Axes, prefix string) string {
	var names, sizes []string
	for _, axis := range group.list() {
		if axis == TP && s.Size(TP) == 1 {
			continue
		}
		names = append(names, prefix+axis.String())
		sizes = append(sizes, fmt.Sprint(s.Size(axis)))
	}
	return fmt.Sprintf("%s = %s = %d", strings.Join(names, " · "), strings.Join(sizes, " · "), s.Size(group))
}

// A Mesh arranges the ranks of a run, and has this rank's communicators: one for each group, also
// for a group of one rank.
type Mesh struct {
	Shape
	world  *Comm
	groups map[Axes]*Comm
	copies []copied
}

// Nested has the communicators for sums that are computed inside replicas first, and then across
// them. Nothing else uses the first two.
type Nested struct {
	Within       *Comm // the ranks of [EP]
	WithinTensor *Comm // the ranks of [EP] and [TP]; Within if [TP] has one rank
	Across       *Comm // the ranks of [ExpertDP]
}

// A copied is a communicator of [Mesh.Split] or [Mesh.Consecutive]: n ranks of a group from number
// first.
type copied struct {
	axes     Axes
	first, n int
	*Comm
}

// meshGroups lists the groups of a mesh that are created with it.
var meshGroups = []Axes{EP, Replicas, Data, PP, TP, Slices}

// groupOf returns the axes of the communicator of a group. If matrices are not shared, [Slices] has
// the ranks of [Data].
func (s Shape) groupOf(axes Axes) Axes {
	if axes == Slices && s.Size(TP) == 1 {
		return Data
	}
	return axes
}

// NewMesh arranges the ranks of the world. All ranks of the world call it. Sums over the group
// [Data] are over [TP] and [EP] first, then over the replicas; see [Mesh.SetInner]. Closing the
// mesh does not close the world.
func NewMesh(ctx context.Context, world *Comm, shape Shape) (*Mesh, error) {
	if shape.Ranks() != world.Size() {
		return nil, fmt.Errorf("a mesh of %s has %d ranks, but the world has %d", shape, shape.Ranks(), world.Size())
	}
	m := &Mesh{Shape: shape, world: world, groups: map[Axes]*Comm{}}
	for _, axes := range meshGroups {
		if m.groupOf(axes) != axes {
			continue
		}
		group, err := m.split(ctx, axes, m.Size(axes))
		if err != nil {
			m.Close()
			return nil, err
		}
		m.groups[axes] = group
	}
	m.SetInner(1)
	return m, nil
}

// SetInner sets the number of consecutive coordinates of [ExpertDP] whose sums are computed first,
// in the groups [Replicas], [Slices] and [Data]. It must divide the size of the axis.
func (m *Mesh) SetInner(replicas int) {
	for _, axes := range []Axes{Replicas, Slices, Data} {
		if n := m.Size(axes &^ ExpertDP); m.groupOf(axes) == axes {
			m.groups[axes].SetInner(n, replicas*n)
		}
	}
}

// SetHosts sets the hosts of the ranks of the world, for all groups; see [Comm.SetHosts].
func (m *Mesh) SetHosts(hosts *Hosts) {
	set := func(group *Comm, axes Axes, first, n int) {
		if n > 1 {
			group.place(hosts.group(m.Shape, m.Rank(), axes, first, n))
		}
	}
	set(m.world, World, 0, m.Ranks())
	for axes, group := range m.groups {
		set(group, axes, 0, m.Size(axes))
	}
	for _, group := range m.copies {
		set(group.Comm, group.axes, group.first, group.n)
	}
}

// NewSingleMesh returns the mesh of a run of one rank.
func NewSingleMesh() *Mesh {
	m := &Mesh{world: NewSingle(), groups: map[Axes]*Comm{}}
	for _, axes := range meshGroups {
		m.groups[axes] = NewSingle()
	}
	return m
}

// World returns the group of all ranks.
func (m *Mesh) World() *Comm { return m.world }

// Rank returns the number of this rank.
func (m *Mesh) Rank() int { return m.world.Rank() }

// Group returns this rank's group: [EP], [PP], [TP], [Replicas], [Slices] or [Data].
func (m *Mesh) Group(axes Axes) *Comm {
	group := m.groups[m.groupOf(axes)]
	if group == nil {
		panic(fmt.Sprintf("comm: a mesh has no group of the axes %s", axes))
	}
	return group
}

// OwnIndex returns the number of this rank in its group.
func (m *Mesh) OwnIndex(group Axes) int { return m.Index(m.Rank(), group) }

// Split returns another communicator of a group, which can be used at the same time as the first.
// All ranks of the world call it.
func (m *Mesh) Split(ctx context.Context, axes Axes) (*Comm, error) {
	return m.Consecutive(ctx, axes, m.Size(axes))
}

// Consecutive returns a communicator of n consecutive ranks of a group, from a rank whose number in
// the group is a multiple of n. n must divide the size of the group. All ranks of the world call
// it.
func (m *Mesh) Consecutive(ctx context.Context, axes Axes, n int) (*Comm, error) {
	group, err := m.split(ctx, axes, n)
	if err == nil {
		m.copies = append(m.copies, copied{axes, m.OwnIndex(axes) / n * n, n, group})
	}
	return group, err
}

// split creates the communicator of [Mesh.Consecutive].
func (m *Mesh) split(ctx context.Context, axes Axes, n int) (*Comm, error) {
	if n == 1 {
		return NewSingle(), nil
	}
	// All ranks of a group have the same number in the groups of the other axes.
	group, part, parts := m.OwnIndex(World&^axes), m.OwnIndex(axes)/n, m.Size(axes)/n
	return m.world.Split(ctx, group*parts+part, m.Rank())
}

// Close closes all groups except the world.
func (m *Mesh) Close() {
	for _, group := range m.groups {
		group.Close()
	}
	for _, group := range m.copies {
		group.Close()
	}
}
