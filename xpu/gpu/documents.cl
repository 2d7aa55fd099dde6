// The first query of a row of the batch that sees only keys after the given one, or the length of the row. begin has the
// first key that each query sees. Query 0 is at position `first`.
INLINE int first_beyond(const global int *begin, const int length, const int first, const int key)
{
	int low = max(key - first, -1), high = length; // a query sees its own key
	while (high - low > 1) {
		const int middle = (low + high) / 2;
		if (begin[middle] > key)
			high = middle;
		else
			low = middle;
	}
	return high;
}
