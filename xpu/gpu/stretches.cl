// A launch has groups for several stretches in the same memories. A table has STRETCH numbers for each: the places of its first element in up to four
// memories, the number of its elements, and its first group.
#define STRETCH 6
#define ELEMENTS 4
#define FIRST_GROUP 5

// stretch_of gives the numbers of the group's stretch.
INLINE const global long *stretch_of(const global long *table, const int stretches)
{
	int low = 0, high = stretches;
	while (high - low > 1) {
		const int middle = (low + high) / 2;
		if (table[STRETCH * middle + FIRST_GROUP] <= (long)get_group_id(0))
			low = middle;
		else
			high = middle;
	}
	return table + STRETCH * low;
}
