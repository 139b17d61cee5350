"""Codes of 2, 4 or 8 bits inside int32 words, as quantised safetensors keep them: unpacked, and packed.

Words are little-endian, so that codes that lie lowest bits first lie first in the bytes as well.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WIDTHS = (2, 4, 8)
"""Bits that a code may have: those that never cross a byte."""

_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # column, of eight, of each nibble from the lowest


def words_for(count: int, bits: int) -> int:
    """How many words hold ``count`` codes."""
    return -(-count * bits // 32)


def unpack(words: NDArray[np.int32], bits: int, count: int) -> NDArray[np.uint8]:
    """The first ``count`` codes of each row of ``[rows, words]``."""
    packed = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return packed[:, :count]
    each = 8 // bits
    codes = np.empty((*packed.shape, each), np.uint8)
    for index in range(each):
        np.right_shift(packed, bits * index, out=codes[..., index])
    codes &= np.uint8((1 << bits) - 1)
    return codes.reshape(len(packed), -1)[:, :count]


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Codes ``[rows, count]``, each below ``2 ** bits``, as words; the last one is filled up with zeros."""
    rows, count = codes.shape
    words = words_for(count, bits)
    each = 8 // bits
    padded = np.zeros((rows, words * 4, each), np.uint8)
    padded.reshape(rows, -1)[:, :count] = codes
    packed = np.zeros((rows, words * 4), np.uint8)
    for index in range(each):
        packed |= padded[..., index] << np.uint8(bits * index)
    return packed.view(np.int32)


def unpack_awq(words: NDArray[np.int32]) -> NDArray[np.uint8]:
    """AWQ's gemm layout: ``[rows, columns / 8]`` words to ``[rows, columns]`` 4-bit codes."""
    rows, count = words.shape
    nibbles = unpack(words, 4, count * 8).reshape(rows, count, 8)
    codes = np.empty_like(nibbles)
    codes[:, :, list(_AWQ_COLUMNS)] = nibbles
    return codes.reshape(rows, count * 8)


def pack_awq(codes: NDArray[np.uint8]) -> NDArray[np.int32]:
    """The inverse of :func:`unpack_awq`; ``columns`` must be a multiple of 8."""
    rows, columns = codes.shape
    nibbles = codes.reshape(rows, columns // 8, 8)[:, :, list(_AWQ_COLUMNS)]
    return pack(np.ascontiguousarray(nibbles).reshape(rows, columns), 4)
