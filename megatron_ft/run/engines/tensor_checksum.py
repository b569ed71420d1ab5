"""Checksums of tensors: equal bits have equal checksums on every device.

The 64-bit words of a tensor are laid out as a matrix. The sums of its rows and of its columns, modulo 2^64, are hashed
with their places and added up. A change in one word changes two of these sums. Any changes in two words cannot cancel
in both: two words that share a column do not share a row. Changes in four or more words can (the corners of a
rectangle, changed by +d, -d, -d and +d). The hash keeps 48 bits, so two different states have the same checksum with a
probability of 2^-48.

Failures it assumes: none.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

_WORD = 8
_MASK = (1 << 64) - 1
_GOLDEN, _FACTORS = 0x9E3779B97F4A7C15, (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
"""The increment of splitmix64."""
BITS = 48
"""Width of a checksum. 0 is reserved for "no checksum"."""


def checksum(tensors: Iterable[tuple[str, torch.Tensor]]) -> int:
    """Return the checksum of named tensors, 1 to 2^48 - 1."""
    return fold(sums(tensors, 0, 1))


def sums(tensors: Iterable[tuple[str, torch.Tensor]], chunk: int, chunks: int) -> list[tuple[str, int]]:
    """Return name and checksum of the part of each tensor that is in the chunk."""
    listed = list(tensors)
    ends, total = [], 0
    for _, tensor in listed:
        total += -(-tensor.numel() * tensor.element_size() // _WORD) * _WORD
        ends.append(total)
    words = total // _WORD
    first, last = words * chunk // chunks * _WORD, words * (chunk + 1) // chunks * _WORD
    names, vectors, begin = [], [], 0
    for (name, tensor), end in zip(listed, ends, strict=True):
        if begin < last and end > first:
            names.append((name, max(first - begin, 0)))
            vectors.append(_sum(tensor, max(first - begin, 0), min(last, end) - begin))
        begin = end
    values = _hashed(vectors)
    found = zip(names, values, strict=True)
    return [(name, _mixed(value ^ _mixed(_hash_of(name) + start))) for (name, start), value in found]


def _sum(tensor: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Return the sums of rows and columns, modulo 2^64, of the 64-bit words between two bytes of a tensor, padded with
    zeros, and the remaining words. They stay on the device."""
    data = tensor.detach()
    data = getattr(data, "_local_tensor", data)  # for a DTensor
    flat = data.contiguous().reshape(-1).view(torch.uint8)[first:last]
    if flat.numel() % _WORD:
        flat = torch.nn.functional.pad(flat, (0, _WORD - flat.numel() % _WORD))
    elif flat.storage_offset() % _WORD:
        flat = flat.clone()
    words = flat.view(torch.int64)
    columns = 1 << (len(words).bit_length() // 2)
    rows = len(words) // columns
    matrix = words[: rows * columns].view(rows, columns)
    return torch.cat([matrix.sum(0), matrix.sum(1), words[rows * columns :]])


def _hashed(vectors: list[torch.Tensor]) -> list[int]:
    """Return for each vector the sum of its numbers, hashed with their places; one wait for each device."""
    values = [0] * len(vectors)
    devices: dict[torch.device, list[int]] = {}
    for index, value in enumerate(vectors):
        devices.setdefault(value.device, []).append(index)
    for device, indices in devices.items():
        sizes = [len(vectors[index]) for index in indices]
        places = torch.arange(max(sizes), device=device) * _signed(_GOLDEN)
        seeds = torch.cat([places[:size] for size in sizes])
        hashed = _mixed_words(torch.cat([vectors[index] for index in indices]) + seeds).split(sizes)
        for index, value in zip(indices, torch.stack([each.sum() for each in hashed]).tolist(), strict=True):
            values[index] = value & _MASK
    return values


def _mixed_words(words: torch.Tensor) -> torch.Tensor:
    """Return :func:`_mixed` of each 64-bit word."""
    words = words + _signed(_GOLDEN)
    for shift, factor in ((30, _FACTORS[0]), (27, _FACTORS[1])):
        words = (words ^ words >> shift & (1 << 64 - shift) - 1) * _signed(factor)
    return words ^ words >> 31 & (1 << 33) - 1


def _signed(word: int) -> int:
    """Return the same 64 bits as a value of torch's int64."""
    return word - (word >> 63 << 64)


def _hash_of(text: str) -> int:
    """Return the FNV-1a hash of a text: Python's own hash differs between processes."""
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = (value ^ byte) * 0x100000001B3 & _MASK
    return value


def _mixed(value: int) -> int:
    """Apply a bijection of 64 bits (splitmix64), in which every bit depends on all others."""
    value = (value + _GOLDEN) & _MASK
    value = (value ^ value >> 30) * _FACTORS[0] & _MASK
    value = (value ^ value >> 27) * _FACTORS[1] & _MASK
    return value ^ value >> 31


def fold(found: Iterable[tuple[str, int]]) -> int:
    """Return one checksum of those of :func:`sums`."""
    total = 0
    for _, value in found:
        total = (total + value) & _MASK
    return _mixed(total) >> (64 - BITS) or 1
