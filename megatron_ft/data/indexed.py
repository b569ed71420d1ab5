"""Megatron's tokenized corpora: a ``.bin`` of token ids and an ``.idx`` of the sequences in it, read and written.

    .idx: the bytes of ``_MAGIC`` | uint64 1 | uint8 dtype | uint64 S | uint64 D | int32 [S] lengths | int64 [S] first
          bytes | int64 [D] numbers of the sequences with which documents begin, and of the one after the last

The first bytes may be in any order, and leave out or repeat parts of the ``.bin``: such an index is a view of it. That of a
multimodal corpus ends with int8 [S] modes.

Both objects for training here are map-style datasets for ``Session.loader``, which decides on the order:
:class:`IndexedTokens`, the samples of one corpus, and :class:`Blend`, those of several in given proportions.

Assumed failures: files that are missing, truncated, not of this format, or not of one corpus.
"""

from __future__ import annotations

import hashlib
import math
import struct
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ft.errors import DataError
from megatron_ft.utils import lfs_pointer, shared_file

IGNORED_LABEL = -100
"""A label that the losses of torch and of Hugging Face's models leave out."""
_MAGIC, _VERSION = b"MMIDIDX\x00\x00", 1
_HEADER = struct.Struct("<9sQBQQ")
_CODES = {1: "u1", 2: "i1", 3: "i2", 4: "i4", 5: "i8", 6: "f8", 7: "f4", 8: "u2"}
_PROBES, _PROBE_BYTES = 256, 4096
"""Pieces of the tokens that a fingerprint covers, evenly spread, and the length of each: 1 MiB, whatever the file has."""
_DTYPES = {np.dtype(f"<{kind}"): code for code, kind in _CODES.items()}


class IndexedTokens:
    """The samples of a corpus: sample i predicts the ``seq_len`` tokens after each of ``tokens[i*seq_len : (i+1)*seq_len]``,
    across document ends, like those of ``PackedDataset``. ``tokens``: those of the sequences, in the order of the index.

    ``dataset[i]`` has ``input_ids`` and ``labels``, int64 [seq_len]; with ``documents`` also ``document_ids``, numbers that
    differ between documents, and ``position_ids``, which begin anew in each: attention within a document only is where
    two ``document_ids`` are equal. The label of a document's last token is then ``IGNORED_LABEL``. Tokens are mapped from
    the file. A sample with a token id below 0, or not below ``vocab_size``, raises ``DataError``.

    Args:
        prefix: path of the two files without ``.bin`` and ``.idx``.
        seq_len: number of tokens in a sample, >= 1.
        documents: whether samples say which document each token is of. Default: no.
        vocab_size: number of token ids of the model. Default: any number.

    Raises:
        DataError: a file is missing, damaged or of another format, or has too few tokens for ``seq_len``.
    """

    read_ahead = True
    """See ``data.prefetch.Dataset``."""

    def __init__(
        self, prefix: str | Path, seq_len: int, *, documents: bool = False, vocab_size: int | None = None
    ) -> None:
        if "\0" in str(prefix) or not isinstance(seq_len, int | np.integer):
            raise DataError(f"{prefix!r} with sequence length {seq_len!r}: give a path and a whole number >= 1")
        self.prefix, self.seq_len, self._vocab_size = str(prefix), int(seq_len), vocab_size
        index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        for file in (index, tokens):
            lfs_pointer.refuse(file, DataError)
        size = tokens.stat().st_size if tokens.is_file() else 0
        try:
            if index.exists() and not index.is_file():  # opening a pipe would wait for its writer
                raise ValueError("it is no file")
            content = np.memmap(index, mode="r").data
            self._parse(content, size, documents)
        except OSError as error:
            raise DataError(
                f"{index} cannot be read ({error.strerror}): name the files without .bin and .idx"
            ) from error
        except ValueError as error:
            raise DataError(f"{index} is damaged or no index of Megatron's: {error}") from None
        if not 1 <= seq_len < self.num_tokens:
            raise DataError(
                f"sequence length {seq_len} does not suit the {self.num_tokens} tokens of {tokens}: use 1 to "
                f"{self.num_tokens - 1}"
            )
        self._tokens = np.memmap(tokens, dtype=self._dtype, mode="r", shape=(size // self._dtype.itemsize,))
        digest = f"{hashlib.sha256(content).hexdigest()}{probed(tokens)}".encode()
        ending = " with documents" if documents else ""
        self.fingerprint = f"{hashlib.sha256(digest).hexdigest()} in samples of {self.seq_len} tokens{ending}"
        """Of the index and of pieces of the tokens, and what makes samples of them."""

    def _parse(self, content: memoryview, size: int, documents: bool) -> None:
        """Check every field of the index, and take from it what samples need. ``size``: bytes of the tokens."""
        if len(content) < _HEADER.size:
            raise ValueError("it is too short")
        magic, version, code, sequences, bounds = _HEADER.unpack_from(content)
        if magic != _MAGIC or version != _VERSION:
            raise ValueError(f"it begins with {magic!r}, version {version}")
        if code not in _CODES or _CODES[code][0] == "f":
            raise ValueError(f"its type of tokens is number {code}")
        modes = len(content) - (_HEADER.size + 12 * sequences + 8 * bounds)
        if modes < 0:
            raise ValueError(f"it is too short for {sequences} sequences and {bounds} documents")
        if modes:
            kind = "it is multimodal, and" if modes == sequences else "it has"
            raise ValueError(f"{kind} {modes} bytes follow the documents: use a corpus of text alone")
        self._dtype = np.dtype(f"<{_CODES[code]}")
        lengths = np.frombuffer(content, "<i4", sequences, _HEADER.size)
        first_bytes = np.frombuffer(content, "<i8", sequences, _HEADER.size + 4 * sequences)
        begins = np.frombuffer(content, "<i8", bounds, _HEADER.size + 12 * sequences)
        if (lengths < 0).any():
            raise ValueError("a sequence has a negative length")
        if not bounds or begins[0] != 0 or begins[-1] != sequences or (begins[1:] < begins[:-1]).any():
            raise ValueError(
                f"its documents do not go in order from sequence 0 to the end of its {sequences} sequences"
            )
        starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self.num_tokens, self.num_documents = int(starts[-1]), len(begins) - 1
        self._document_starts = starts[begins[:-1]] if documents else None
        self._view = self._view_of(lengths, first_bytes, starts[:-1], size)

    def _view_of(
        self, lengths: np.ndarray, first_bytes: np.ndarray, starts: np.ndarray, size: int
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the number of tokens before each sequence, and how much further on it is in the file; None if the sequences
        are the file."""
        width = self._dtype.itemsize
        if (first_bytes == starts * width).all():
            if size != self.num_tokens * width or not size:
                raise DataError(
                    f"{self.prefix}.bin has {size} bytes, {Path(self.prefix).name}.idx says {self.num_tokens * width}: copy "
                    f"both files again"
                )
            return None
        outside = (
            (first_bytes < 0) | (first_bytes % width != 0) | (first_bytes + lengths.astype(np.int64) * width > size)
        )
        if outside.any():
            number = int(outside.argmax())
            raise ValueError(
                f"its sequence {number} has {lengths[number]} tokens of {width} bytes from byte {first_bytes[number]} on, "
                f"the .bin has {size} bytes"
            )
        return starts, first_bytes // width - starts

    def __len__(self) -> int:
        return (self.num_tokens - 1) // self.seq_len

    def _read(self, places: np.ndarray) -> np.ndarray:
        """Return the tokens at consecutive places of the sequences: int64 [T]."""
        if self._view is None:
            return self._tokens[places[0] : places[-1] + 1].astype(np.int64)
        starts, further = self._view
        return self._tokens[places + further[np.searchsorted(starts, places, side="right") - 1]].astype(np.int64)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside range({len(self)})")
        first = index * self.seq_len
        places = np.arange(first, first + self.seq_len + 1)
        found = self._read(places)
        check_ids(found, self._vocab_size, f"{self.prefix}.bin, sample {index}")
        if self._document_starts is None:
            return packed(found)
        document = np.searchsorted(self._document_starts, places, side="right")
        return packed(found, document[:-1] != document[1:])


def check_ids(tokens: np.ndarray, vocab_size: int | None, name: str) -> None:
    """Raise ``DataError`` for a token id below 0, or not below ``vocab_size``: as a label it would be left out or clipped
    without a word."""
    least, largest = int(tokens.min()), int(tokens.max())
    if least < 0 or (vocab_size is not None and largest >= vocab_size):
        wrong = least if least < 0 else largest
        rule = "0 or more" if vocab_size is None else f"in range({vocab_size}), the model's vocabulary"
        raise DataError(f"{name}: has token id {wrong}, ids must be {rule}: use the vocabulary that made these tokens")


def packed(tokens: np.ndarray, is_end: np.ndarray | None = None) -> dict[str, torch.Tensor]:
    """Return what the engine needs of samples, int64 [..., seq_len + 1]: ``input_ids`` and ``labels``, int64 [..., seq_len].

    ``is_end``: which of the first seq_len tokens end a document. The result then also has ``document_ids``, from 0 in each
    sample, and ``position_ids``, and the label of a document's last token is ``IGNORED_LABEL``.
    """
    found = {"input_ids": tokens[..., :-1], "labels": tokens[..., 1:]}
    if is_end is not None:
        found["labels"] = np.where(is_end, IGNORED_LABEL, found["labels"])
        places = np.broadcast_to(np.arange(is_end.shape[-1]), is_end.shape)
        begins = np.zeros_like(places)
        begins[..., 1:] = np.where(is_end[..., :-1], places[..., 1:], 0)
        found["document_ids"] = np.cumsum(is_end, axis=-1) - is_end
        found["position_ids"] = places - np.maximum.accumulate(begins, axis=-1)
    return {name: torch.from_numpy(np.ascontiguousarray(values)) for name, values in found.items()}


def probed(path: Path) -> str:
    """Return a sha256 of evenly spread pieces of a file, 1 MiB together, and of its ends: a copy that is not complete has
    another one in most cases, and no rank waits for the whole file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = file.seek(0, 2)
        for number in range(_PROBES):
            file.seek(max(size - _PROBE_BYTES, 0) * number // (_PROBES - 1))
            digest.update(file.read(_PROBE_BYTES))
    return digest.hexdigest()


class Blend:
    """Samples of several datasets in given proportions. Of each dataset with the share s of the weights, sample j is due at
    (j + 1/2) / s, and the samples of the blend are in the order in which they are due: after any number of samples each
    dataset has its share, to within fewer samples than there are datasets. A dataset that is used up begins again.

    The place of a sample is computed when it is asked for: a blend has no table, and is made at once whatever its size. For
    the order of Megatron's blends, which is another one with the same proportions, give its ``BlendedDataset`` to
    ``Session.loader``.

    Args:
        datasets: each with ``dataset[index]`` and ``len(dataset)``.
        weights: one for each, > 0; their proportions count.
        size: number of samples, >= 1. Default: until one dataset is used up.

    Raises:
        DataError: the numbers of datasets and weights differ, a weight is not finite and above 0, a dataset has no samples,
            or samples of another length than another one, or ``size`` is below 1.
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], size: int | None = None) -> None:
        fits = all(isinstance(each, int | float | np.number) and 0 < each < float("inf") for each in weights)
        if len(datasets) != len(weights) or not datasets or not fits:
            raise DataError(
                f"a blend of {len(datasets)} datasets has the weights {list(weights)}: one above 0 for each"
            )
        if size is not None and not (isinstance(size, int | np.integer) and size >= 1):
            raise DataError(f"a blend has the size {size!r}: give a whole number of samples >= 1, or leave it out")
        lengths = [len(one) for one in datasets]
        if 0 in lengths:
            raise DataError(f"dataset {lengths.index(0)} of a blend has no samples: leave it and its weight out")
        if len(sizes := {getattr(one, "seq_len", 0) for one in datasets}) > 1:
            raise DataError(
                f"the datasets of a blend have samples of {sorted(sizes)} tokens: give all the same seq_len"
            )
        self.datasets = list(datasets)
        self.seq_len: int = getattr(datasets[0], "seq_len", 0)
        """Number of tokens in a sample, if the datasets say it."""
        scaled = [float(each) / float(max(weights)) for each in weights]
        self._shares = np.array([each / math.fsum(scaled) for each in scaled])
        longest = min(length / share for length, share in zip(lengths, self._shares.tolist(), strict=True) if share)
        self._size = int(longest) if size is None else int(size)
        self.read_ahead = all(getattr(one, "read_ahead", False) for one in datasets)
        said = [getattr(one, "fingerprint", len(one)) for one in datasets]
        self.fingerprint = hashlib.sha256(repr((said, list(map(float, weights)), self._size)).encode()).hexdigest()

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        if not 0 <= index < self._size:
            raise IndexError(f"sample {index} is outside range({self._size})")
        which, number = self.place(int(index))
        return self.datasets[which][number % len(self.datasets[which])]

    def place(self, index: int) -> tuple[int, int]:
        """Return the dataset of a sample, and how many samples of that dataset are before it in the blend."""
        shares, half = self._shares, len(self._shares) / 2 + 1
        # At any time, each dataset has had half a sample more or less than its share of the time. So the time at which this
        # sample is due differs from its number by half the number of datasets at most; 1 more leaves room for rounding.
        firsts = np.floor(np.maximum((index - half) * shares - 0.5, 0.0)).astype(np.int64)
        counts = np.floor((index + half) * shares + 0.5).astype(np.int64) - firsts
        which = np.repeat(np.arange(len(shares)), counts)
        numbers = np.arange(len(which)) + np.repeat(firsts - np.cumsum(counts) + counts, counts)
        order = np.lexsort((which, (numbers + 0.5) / shares[which]))
        chosen = order[index - firsts.sum()]
        return int(which[chosen]), int(numbers[chosen])


def open_corpora(
    words: Sequence[str], seq_len: int, *, documents: bool = False, vocab_size: int | None = None
) -> IndexedTokens | Blend:
    """Open corpora that are named as for Megatron's ``--data-path``: ``PREFIX``, or ``WEIGHT PREFIX WEIGHT PREFIX ...``.

    The other arguments and the errors are those of :class:`IndexedTokens`. Raises ``DataError`` for words of another form.
    """
    if isinstance(words, str):
        raise DataError(f"open_corpora({words!r}): give a list of words, [{words!r}]")
    if len(words) == 1:
        return IndexedTokens(words[0], seq_len, documents=documents, vocab_size=vocab_size)
    try:
        weights = [float(word) for word in words[::2]]
        if not words or len(words) % 2 or not all(0 < weight < float("inf") for weight in weights):
            raise ValueError
    except ValueError:
        raise DataError(
            f"{' '.join(words)!r} names no corpora: give one PREFIX, or a weight above 0 before each, as in 0.7 A 0.3 B"
        ) from None
    corpora = [IndexedTokens(prefix, seq_len, documents=documents, vocab_size=vocab_size) for prefix in words[1::2]]
    return Blend(corpora, weights)


def write(prefix: str | Path, documents: Iterable[np.ndarray], dtype: Any = np.int32) -> None:
    """Write documents, each one sequence of token ids, as ``prefix.bin`` and ``prefix.idx``, which appear complete.

    Raises ``DataError`` for a type of tokens that the format does not have, or that does not hold a token, for a token below
    0, and for a document that is no row of whole numbers.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    if kind not in _DTYPES or kind.kind == "f":
        raise DataError(
            f"tokens of type {np.dtype(dtype)} cannot be written; use one of {', '.join(map(str, _DTYPES))}"
        )
    lengths = array("i")
    tokens, index_file = Path(f"{prefix}.bin"), Path(f"{prefix}.idx")
    with shared_file.replacing(tokens, durable=True, mode=0o666) as fd, open(fd, "wb", closefd=False) as file:
        for document in map(np.asarray, documents):
            if document.ndim != 1 or (document.size and document.dtype.kind not in "iu"):
                raise DataError(
                    f"document {len(lengths)} is {document.dtype} of the shape {document.shape}: give whole numbers [T]"
                )
            if len(document) and not 0 <= document.min() <= document.max() <= np.iinfo(kind).max:
                raise DataError(
                    f"document {len(lengths)} has tokens {document.min()} to {document.max()}, {kind.name} holds 0 to "
                    f"{np.iinfo(kind).max}: use another type"
                )
            lengths.append(len(document))
            file.write(document.astype(kind).tobytes())
        file.flush()
        index_file.unlink(missing_ok=True)  # an old index must not be found with the new tokens
    shared_file.write(index_file, index(lengths, kind), durable=True, mode=0o666)


def index(lengths: Sequence[int], dtype: np.dtype) -> bytes:
    """Return the content of the ``.idx`` of documents with these lengths, each one sequence. uint32, which the format does
    not have, is called int32: ids are below 2**31."""
    kind = dtype.newbyteorder("<") if dtype != np.uint32 else np.dtype("<i4")
    sizes = np.array(lengths, dtype="<i4")
    starts = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64)])[: len(sizes)] * kind.itemsize
    header = _HEADER.pack(_MAGIC, _VERSION, _DTYPES[kind], len(sizes), len(sizes) + 1)
    return header + sizes.tobytes() + starts.astype("<i8").tobytes() + np.arange(len(sizes) + 1, dtype="<i8").tobytes()
