"""The digest of a batch, which two groups compare (``core.exactness.batches``).

- A tensor or an array counts with dtype, shape and bytes, on whichever device; so does what numpy can turn into an array.
- A number, a text, bytes, None, an element of an enumeration: with type and value.
- A mapping (``BatchEncoding`` too), list, tuple, set, data class: with what it contains; the order of keys does not count.
- Any other object: with its type and its public attributes (``vars``); one without attributes only with its type.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from hashlib import blake2b
from typing import Any

import numpy as np
import torch

BITS = 48
MOST = 1000
"""Number of leaves that are named at most; the digest covers all."""

Leaf = tuple[str, str, str]


def leaves(batch: Any) -> list[Leaf]:
    """Return path, kind and hash of all that a batch contains."""
    return list(_leaves(batch, "", frozenset()))


def digest(found: list[Leaf]) -> int:
    """Return the digest of a batch from its leaves: 1 to 2**48 - 1."""
    return number(repr(found), BITS)


def number(text: str, bits: int) -> int:
    """Return a hash of ``text`` with that many bits, not 0."""
    value = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
    return value % (1 << bits) or 1


def _hash(content: Any) -> str:
    return blake2b(content, digest_size=8).hexdigest()


def _leaves(value: Any, path: str, above: frozenset[int]) -> Iterator[Leaf]:
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        plain = value.detach().cpu().contiguous().resolve_conj().resolve_neg()
        content = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else b""
        yield path, f"tensor {str(value.dtype).removeprefix('torch.')} {list(value.shape)}", _hash(content)
    elif isinstance(value, torch.Tensor):
        yield path, f"tensor of layout {value.layout} {list(value.shape)}", ""
    elif value is None or isinstance(value, bool | int | float | complex | str | bytes | enum.Enum | np.generic):
        yield path, type(value).__name__, _hash(repr(value).encode())
    elif id(value) in above:
        yield path, f"{type(value).__name__} that contains itself", ""
    elif isinstance(value, np.ndarray) and value.dtype != object:
        yield path, f"array {value.dtype} {list(value.shape)}", _hash(np.ascontiguousarray(value).tobytes())
    else:
        yield from _inside(value, path, above | {id(value)})


def _inside(value: Any, path: str, above: frozenset[int]) -> Iterator[Leaf]:
    kind = type(value).__name__
    if isinstance(value, Mapping):
        yield path, kind, str(len(value))
        for key in sorted(value, key=repr):
            yield from _leaves(value[key], f"{path}[{key!r}]", above)
    elif isinstance(value, list | tuple | np.ndarray):
        yield path, kind, str(len(value))
        for at, one in enumerate(value):
            yield from _leaves(one, f"{path}[{at}]", above)
    elif isinstance(value, AbstractSet):
        yield path, kind, _hash(repr(sorted(repr(leaves(one)) for one in value)).encode())
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield path, kind, ""
        for field in dataclasses.fields(value):
            yield from _leaves(getattr(value, field.name, None), f"{path}.{field.name}", above)
    elif hasattr(type(value), "__array__"):
        yield from _leaves(np.asarray(value), path, above)
    else:
        yield path, kind, ""
        attributes = {} if isinstance(value, type) or callable(value) else getattr(value, "__dict__", {})
        for name in sorted(name for name in attributes if not name.startswith("_")):
            yield from _leaves(attributes[name], f"{path}.{name}", above)
