"""Compact binary columns of integers: the format of the log cursor."""

from __future__ import annotations

import zlib
from base64 import b85decode, b85encode
from collections.abc import Iterable


def pack_integers(numbers: Iterable[int]) -> bytes:
    """Each integer as a zigzag varint: 7 bits per byte, lowest first, the high bit set on all but the last byte."""
    out = bytearray()
    for number in numbers:
        rest = number * 2 if number >= 0 else -number * 2 - 1
        while rest > 127:
            out.append(rest & 127 | 128)
            rest >>= 7
        out.append(rest)
    return bytes(out)


def unpack_integers(data: bytes, start: int, count: int) -> tuple[list[int], int]:
    """`count` integers from offset `start`, and the offset after them; ValueError if the data ends too early."""
    numbers = []
    for _ in range(count):
        rest = shift = 0
        while True:
            if start >= len(data):
                raise ValueError("packed integers end too early")
            byte = data[start]
            start += 1
            rest |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                break
        numbers.append(rest // 2 if rest % 2 == 0 else -(rest + 1) // 2)
    return numbers, start


def compress(data: bytes) -> str:
    """zlib, then base85 of Python's `b85encode`, whose characters need no escaping in JSON."""
    return b85encode(zlib.compress(data, 9)).decode()


def decompress(text: str) -> bytes:
    """Reverse `compress`; ValueError if the text is damaged."""
    try:
        return zlib.decompress(b85decode(text))
    except zlib.error as e:
        raise ValueError(f"damaged data: {e}") from None
