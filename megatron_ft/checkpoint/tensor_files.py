"""The safetensors format (huggingface.co/docs/safetensors): a header in JSON, then the tensors' bytes. Nothing to unpickle.

    8 bytes: length of the header | header: {name: {"dtype", "shape", "data_offsets"}} | tensors, without gaps

Written and read here rather than by the library: the checksum is taken of the bytes on their way, so it is that of what was
given and not of what a disk gave back; nothing is read twice; and what the system refuses keeps its error number. The
library, and so PyTorch's stock reader, reads these files (a test does).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch

from megatron_ft.errors import CheckpointError
from megatron_ft.runtime.checkpoint.files import CHUNK_BYTES

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}
_DTYPES = {code: dtype for dtype, code in CODES.items()}
RESERVED = "__metadata__"
"""A key of the header that is no tensor."""


def encode(tensors: Mapping[str, torch.Tensor]) -> Iterator[Any]:
    """The file's bytes, piece by piece. ``tensors`` are contiguous, on the CPU, and of a dtype in ``CODES``."""
    # The widest first, as the library does it: every tensor then begins at a multiple of its own width.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {RESERVED: {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        if tensor.numel():
            yield _bytes(tensor)


def decode(path: Path, bytes_: int, sha256: str) -> dict[str, torch.Tensor]:
    """Read all tensors of a file that must have this length and checksum.

    Raises ``OSError``, or ``CheckpointError`` saying what is wrong with the file.
    """
    with path.open("rb", buffering=0) as file:
        digest = hashlib.sha256()
        length = int.from_bytes(_read(file, bytearray(8), digest, path), "little")
        if length > bytes_ - 8:
            raise CheckpointError(f"{path} is damaged: its header claims {length} bytes in a file of {bytes_}")
        header = _header(_read(file, bytearray(length), digest, path), bytes_ - 8 - length, path)
        tensors = {}
        for name, dtype, shape in header:
            tensors[name] = torch.empty(shape, dtype=dtype)
            if tensors[name].numel():
                _read(file, _bytes(tensors[name]), digest, path)
        if file.read(1):
            raise CheckpointError(f"{path} is damaged: it is longer than the {bytes_} bytes that were written")
    if digest.hexdigest() != sha256:
        raise CheckpointError(f"{path} is damaged: its sha256 is {digest.hexdigest()}, {sha256} was written")
    return tensors


def _header(text: bytearray, available: int, path: Path) -> list[tuple[str, torch.dtype, list[int]]]:
    """Name, dtype and shape in the order of the bytes. Not verified yet: no size in it is believed."""
    try:
        entries = [(name, entry) for name, entry in json.loads(text).items() if name != RESERVED]
        found, end = [], 0
        for name, entry in sorted(entries, key=lambda item: item[1]["data_offsets"]):
            dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
            begin, end = end, end + math.prod(shape) * dtype.itemsize
            if entry["data_offsets"] != [begin, end] or min(shape, default=0) < 0:
                raise ValueError(f"{name} does not fill its place")
            found.append((name, dtype, shape))
        if end != available:
            raise ValueError(f"{end} bytes of tensors, but {available} in the file")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is damaged: its header cannot be read ({error!r})") from None
    return found


def _read(file: BinaryIO, buffer: Any, digest: Any, path: Path) -> Any:
    """Fill a buffer from the file, and take its bytes into the checksum."""
    view = memoryview(buffer)
    while view:
        number = file.readinto(view[:CHUNK_BYTES])
        if not number:
            raise CheckpointError(f"{path} is damaged: it ends {len(view)} bytes before a tensor or its header does")
        digest.update(view[:number])
        view = view[number:]
    return buffer


def _bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's memory."""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
