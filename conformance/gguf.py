"""Reads the vocabulary of a GGUF file without tensors, as llama.cpp ships them for its tests."""

import struct

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


def fields(data):
    """Returns the metadata of a GGUF file: strings as bytes, arrays as lists."""
    at = 0

    def number(code):
        nonlocal at
        (value,) = struct.unpack_from(f"<{code}", data, at)
        at += struct.calcsize(f"<{code}")
        return value

    def string():
        nonlocal at
        size = number("Q")
        at += size
        return data[at - size : at]

    def value(kind):
        nonlocal at
        if kind == STRING:
            return string()
        if kind != ARRAY:
            return number(SCALARS[kind])
        kind, count = number("I"), number("Q")
        if kind == STRING:
            return [string() for _ in range(count)]
        code = f"<{count}{SCALARS[kind]}"
        values = list(struct.unpack_from(code, data, at))
        at += struct.calcsize(code)
        return values

    if number("4s") != b"GGUF":
        raise ValueError("not a GGUF file")
    number("I"), number("Q")  # version, number of tensors
    return {string().decode(): value(number("I")) for _ in range(number("Q"))}


def vocabulary(data):
    """Returns the tokens, the scores and kinds of the tokens (or None), and the other fields."""
    found = {k.removeprefix("tokenizer.ggml."): v for k, v in fields(data).items() if k.startswith("tokenizer.ggml.")}
    tokens = [t.decode() for t in found["tokens"]]
    return tokens, found.get("scores"), found.get("token_type"), found
