"""The safetensors format (huggingface.co/docs/safetensors): a JSON header and the tensors' bytes, without pickle.

    8 bytes: length of the header | header: {name: {"dtype", "shape", "data_offsets"}} | tensors, without gaps

The ``safetensors`` package is not used. It returns no checksum of what it writes, so every file would be read back, and
the checksum would be that of what the disk returns, not of what was saved. To load, it would read every file twice,
once for the checksum and once through a memory map, and a file that is truncated meanwhile would end the process with
SIGBUS. Its errors have no error number, from which the remedies in ``files`` are chosen. The package, and so PyTorch's
stock reader, reads the files of this module; a test shows it.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch

from megatron_ft.errors import CheckpointError
from megatron_ft.utils import shared_file
from megatron_ft.utils.durable_file import CHUNK_BYTES

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
"""Key of the header that does not name a tensor."""


def encode(tensors: Mapping[str, torch.Tensor]) -> Iterator[Any]:
    """Yield the bytes of a file in pieces. ``tensors`` are contiguous, on the CPU, and have a dtype in ``CODES``."""
    # The widest dtypes come first, as in the library: every tensor then begins at a multiple of its own width.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {RESERVED: {"format": "pt"}}
    end = 0
    for name, tensor in ordered:
        begin, end = end, end + tensor.nbytes
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, tensor in ordered:
        if tensor.numel():
            yield _bytes(tensor)


def decode(path: Path, bytes_: int, sha256: str) -> dict[str, torch.Tensor]:
    """Return all tensors of a file, which must have this length and checksum.

    Raises ``OSError``, or ``CheckpointError`` with what is wrong with the file.
    """
    with shared_file.open_regular(path) as buffered:
        file = cast(io.FileIO, buffered.raw)
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
    """Return name, dtype and shape in the order of the bytes. The header is not verified yet, so all sizes are
    checked."""
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


def _read(file: io.FileIO, buffer: Any, digest: Any, path: Path) -> Any:
    """Fill a buffer from the file, and add its bytes to the checksum."""
    view = memoryview(buffer)
    while view:
        number = file.readinto(view[:CHUNK_BYTES])
        if not number:
            raise CheckpointError(f"{path} is damaged: it ends {len(view)} bytes before a tensor or its header does")
        digest.update(view[:number])
        view = view[number:]
    return buffer


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
