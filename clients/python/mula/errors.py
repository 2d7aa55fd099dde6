"""The exceptions of the package. Only Error is public."""

from __future__ import annotations

import operator
from typing import Any


class Error(Exception):
    """An error. Its message is one sentence with the problem and the remedy."""


class Broken(Exception):
    """A connection that failed or ended early. The request can be retried."""


def whole(name: str, value: Any) -> int:
    """Returns an argument as an int.

    Integers of numpy and torch are accepted. Text, fractions and booleans raise an Error.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise Error(f"{name}={value!r:.200}: want a whole number") from None
