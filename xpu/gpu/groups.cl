// The group that has number i, below first[groups]: the last group whose first number is at most i. Earlier groups with
// the same first number are empty.
INLINE int group_of(global const int *first, const int groups, const int i)
{
	int low = 0, high = groups;
	while (high - low > 1) {
		const int middle = (low + high) / 2;
		if (first[middle] <= i)
			low = middle;
		else
			high = middle;
	}
	return low;
}
