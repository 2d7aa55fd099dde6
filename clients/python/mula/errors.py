"""The one exception of the package."""

from __future__ import annotations

import operator
from typing import Any


class Error(Exception):
    """What went wrong, and what can be done about it, in one sentence."""


class Broken(Exception):
    """A connection that ended before its time, or could not be made: it is worth another try."""


def whole(name: str, value: Any) -> int:
    """Returns an argument as an int. Integers of numpy and torch are accepted; text, fractions and truth values are an Error."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise Error(f"{name}={value!r:.200}: want a whole number") from None
