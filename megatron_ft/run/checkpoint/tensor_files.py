"""The safetensors format (huggingface.co/docs/safetensors): a JSON header and the tensors' bytes, without pickle.

    8 bytes: length of the header | header: {name: {"dtype", "shape", "data_offsets"}} | tensors, without gaps

The ``safetensors`` package reads these files. It does not write them: ``save_file`` returns no checksum, so every file would
be read back, and the checksum would be that of what the disk returns, not of what was saved; ``save`` takes twice the size
of a part beside it in memory, and holds the interpreter lock meanwhile. Errors of both have no error number, from which the
remedies in ``durable_file`` are chosen.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from megatron_ft.errors import CheckpointError
from megatron_ft.utils import shared_file

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


def decode(path: Path, sha256: str) -> dict[str, torch.Tensor]:
    """Return all tensors of a file, which must have this checksum. It is compared with what is in memory, so nothing is read
    twice.

    Raises ``OSError``, or ``CheckpointError`` with what is wrong with the file.
    """
    digest = hashlib.sha256()
    with shared_file.open_regular(path) as file:
        try:
            # Not through a memory map, with which a file that is truncated meanwhile ends the process.
            tensors = load_file(f"/proc/self/fd/{file.fileno()}", backend="pread")
            for piece in encode(tensors):
                digest.update(piece)
        except (SafetensorError, KeyError) as error:  # KeyError: a dtype that is never written
            raise CheckpointError(f"{path} is damaged: its header cannot be read ({error})") from None
    if digest.hexdigest() != sha256:
        raise CheckpointError(
            f"{path} is damaged: its tensors have the sha256 {digest.hexdigest()}, {sha256} was written"
        )
    return tensors


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data
