"""The one exception of the package."""


class Error(Exception):
    """What went wrong, and what can be done about it, in one sentence."""


class Broken(Exception):
    """A connection that ended before its time, or could not be made: it is worth another try."""
