// Sums of squares without doubles, for numbers of any size. The squares of large and of small numbers
// have separate sums, of the numbers times 2^-80 and 2^80. The sums of 2^16 finite numbers are finite,
// and 0 only if the numbers are.
typedef struct {
	lanes large, middle, small;
} squares;

static void add_square(squares *s, lanes x)
{
	const lanes size = fabs(x), none = 0, middle = select(x, none, size > 0x1p40f || size < 0x1p-40f);
	s->middle += middle * middle;
	if (any_lane(size > 0x1p40f || size < 0x1p-40f)) {
		const lanes large = select(none, x * 0x1p-80f, size > 0x1p40f), small = select(none, x * 0x1p80f, size < 0x1p-40f);
		s->large += large * large;
		s->small += small * small;
	}
}

static void add_squares(squares *s, squares t)
{
	s->large += t.large;
	s->middle += t.middle;
	s->small += t.small;
}

// store_squares stores the three sums of a group.
void store_squares(global float *sums, squares s, local float *part)
{
	const float large = group_sum(lanes_sum(s.large), part);
	const float middle = group_sum(lanes_sum(s.middle), part);
	const float small = group_sum(lanes_sum(s.small), part);
	if (ITEM == 0) {
		sums[0] = large;
		sums[1] = middle;
		sums[2] = small;
	}
}

// The number of elements whose squares a group adds up at a time: 32 for each lane. These sums are
// then added, so that no sum has many terms.
#define AT_A_TIME (32 * LANES * GROUP)

// The smaller or the larger of x and bound; NaN if x is NaN.
static lanes at_most(lanes x, float bound) { return select(x, (lanes)bound, x > (lanes)bound); }
static lanes at_least(lanes x, float bound) { return select(x, (lanes)bound, x < (lanes)bound); }
