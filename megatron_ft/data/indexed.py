"""Megatron's tokenized corpora: a ``.bin`` of token ids and an ``.idx`` of the sequences in it, read and written.

    .idx: the bytes of ``_MAGIC`` | uint64 1 | uint8 dtype | uint64 S | uint64 D | int32 [S] lengths | int64 [S] first
          bytes | int64 [D] numbers of the sequences with which documents begin, and of the one after the last

Both objects for training here are map-style datasets for ``Session.loader``, which decides on the order:
:class:`IndexedTokens`, the samples of one corpus, and :class:`Blend`, those of several in given proportions.

Assumed failures: files that are missing, truncated or not of this format.
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ft.errors import DataError

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
    across document ends, like those of ``PackedDataset``.

    ``dataset[i]`` has ``input_ids`` and ``labels``, int64 [seq_len]; with ``documents`` also ``document_ids``, numbers that
    differ between documents, and ``position_ids``, which begin anew in each: attention within a document only is where
    two ``document_ids`` are equal. The label of a document's last token is then ``IGNORED_LABEL``. Tokens are mapped from
    the file.

    Args:
        prefix: path of the two files without ``.bin`` and ``.idx``.
        seq_len: number of tokens in a sample, >= 1.
        documents: whether samples say which document each token is of. Default: no.

    Raises:
        DataError: a file is missing, damaged or of another format, or has too few tokens for ``seq_len``.
    """

    def __init__(self, prefix: str | Path, seq_len: int, *, documents: bool = False) -> None:
        if "\0" in str(prefix) or not isinstance(seq_len, int | np.integer):
            raise DataError(f"{prefix!r} with sequence length {seq_len!r}: give a path and a whole number >= 1")
        self.prefix, self.seq_len, self._says_documents = str(prefix), int(seq_len), documents
        index = Path(f"{prefix}.idx")
        try:
            content = index.read_bytes()
        except OSError as error:
            raise DataError(
                f"{index} cannot be read ({error.strerror}): name the files without .bin and .idx"
            ) from error
        try:
            self._parse(content)
        except ValueError as error:
            raise DataError(f"{index} is damaged or no index of Megatron's: {error}") from None
        self.num_tokens = int(self.lengths.sum())
        tokens = Path(f"{prefix}.bin")
        expected = self.num_tokens * self._dtype.itemsize
        size = tokens.stat().st_size if tokens.is_file() else 0
        if size != expected or not size:
            raise DataError(f"{tokens} has {size} bytes, {index.name} says {expected}: copy both files again")
        if not 1 <= seq_len < self.num_tokens:
            raise DataError(
                f"sequence length {seq_len} does not suit the {self.num_tokens} tokens of {tokens}: use 1 to "
                f"{self.num_tokens - 1}"
            )
        self._tokens = np.memmap(tokens, dtype=self._dtype, mode="r")
        ends = np.cumsum(self.lengths)
        last = self.documents[1:] - 1
        self._document_ends = ends[last[last >= 0]]
        digest = hashlib.sha256(content)
        with tokens.open("rb") as file:
            for number in range(_PROBES):
                file.seek(max(size - _PROBE_BYTES, 0) * number // (_PROBES - 1))
                digest.update(file.read(_PROBE_BYTES))
        said = " with documents" if documents else ""
        self.fingerprint = f"{digest.hexdigest()} in samples of {self.seq_len} tokens{said}"
        """The sha256 of the index and of pieces of the tokens, and what makes samples of them."""

    def _parse(self, content: bytes) -> None:
        if len(content) < _HEADER.size:
            raise ValueError("it is too short")
        magic, version, code, sequences, documents = _HEADER.unpack_from(content)
        if magic != _MAGIC or version != _VERSION:
            raise ValueError(f"it begins with {magic!r}, version {version}")
        if code not in _CODES or _CODES[code][0] == "f":
            raise ValueError(f"its type of tokens is number {code}")
        if len(content) < _HEADER.size + 12 * sequences + 8 * documents:
            raise ValueError(f"it is too short for {sequences} sequences and {documents} documents")
        self._dtype = np.dtype(f"<{_CODES[code]}")
        self.lengths = np.frombuffer(content, "<i4", sequences, _HEADER.size).astype(np.int64)
        self.documents = np.frombuffer(content, "<i8", documents, _HEADER.size + 12 * sequences)
        if (self.lengths < 0).any() or (np.diff(self.documents) < 0).any() or (self.documents > sequences).any():
            raise ValueError("its lengths or documents are impossible")

    def __len__(self) -> int:
        return (self.num_tokens - 1) // self.seq_len

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is outside range({len(self)})")
        first = index * self.seq_len
        tokens = torch.from_numpy(self._tokens[first : first + self.seq_len + 1].astype(np.int64))
        sample = {"input_ids": tokens[:-1], "labels": tokens[1:]}
        if self._says_documents:
            places = np.arange(first, first + self.seq_len)
            document, following = (
                np.searchsorted(self._document_ends, at, side="right") for at in (places, places + 1)
            )
            begins = np.where(document > 0, self._document_ends[np.maximum(document - 1, 0)], 0)
            sample["labels"] = tokens[1:].masked_fill(torch.from_numpy(document != following), IGNORED_LABEL)
            sample["document_ids"] = torch.from_numpy(document.astype(np.int64))
            sample["position_ids"] = torch.from_numpy(places - np.maximum(begins, first))
        return sample


class Blend:
    """Samples of several datasets in given proportions, as Megatron blends them: the next sample is always one of the
    dataset that lags furthest behind its weight, so that after any number of samples each has its share, to within fewer
    samples than there are datasets. A dataset that is used up begins again.

    Args:
        datasets: each with ``dataset[index]`` and ``len(dataset)``.
        weights: one for each, > 0; their proportions count.
        size: number of samples, >= 1. Default: until one dataset is used up.

    Raises:
        DataError: the numbers of datasets and weights differ, a weight is not finite and above 0, or ``size`` is below 1.
    """

    def __init__(self, datasets: Sequence[Any], weights: Sequence[float], size: int | None = None) -> None:
        fits = all(isinstance(each, int | float | np.number) and 0 < each < float("inf") for each in weights)
        if len(datasets) != len(weights) or not datasets or not fits:
            raise DataError(
                f"a blend of {len(datasets)} datasets has the weights {list(weights)}: one above 0 for each"
            )
        if size is not None and not (isinstance(size, int | np.integer) and size >= 1):
            raise DataError(f"a blend has the size {size!r}: give a whole number of samples >= 1, or leave it out")
        self.datasets = list(datasets)
        self.seq_len: int = getattr(datasets[0], "seq_len", 0)
        """Number of tokens in a sample, if the datasets say it."""
        shares = np.array(weights, dtype=np.float64) / sum(weights)
        longest = min(len(one) / share for one, share in zip(datasets, shares, strict=True))
        self._of, self._index = _blended(shares, int(longest) if size is None else size)
        said = [getattr(one, "fingerprint", len(one)) for one in datasets]
        self.fingerprint = hashlib.sha256(repr((said, list(map(float, weights)), len(self._of))).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, index: int) -> Any:
        dataset = self.datasets[self._of[index]]
        return dataset[int(self._index[index]) % len(dataset)]


def open_corpora(words: Sequence[str], seq_len: int, *, documents: bool = False) -> IndexedTokens | Blend:
    """Open corpora that are named as for Megatron's ``--data-path``: ``PREFIX``, or ``WEIGHT PREFIX WEIGHT PREFIX ...``.

    The other arguments and the errors are those of :class:`IndexedTokens`. Raises ``DataError`` for words of another form.
    """
    if isinstance(words, str):
        raise DataError(f"open_corpora({words!r}): give a list of words, [{words!r}]")
    if len(words) == 1:
        return IndexedTokens(words[0], seq_len, documents=documents)
    try:
        weights = [float(word) for word in words[::2]]
        if not words or len(words) % 2 or not all(0 < weight < float("inf") for weight in weights):
            raise ValueError
    except ValueError:
        raise DataError(
            f"{' '.join(words)!r} names no corpora: give one PREFIX, or a weight above 0 before each, as in 0.7 A 0.3 B"
        ) from None
    return Blend([IndexedTokens(prefix, seq_len, documents=documents) for prefix in words[1::2]], weights)


def _blended(shares: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the dataset of each sample and its number there: always of the one that lags furthest behind its share."""
    of, index = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    taken = [0] * len(shares)
    listed = shares.tolist()
    for number in range(size):
        lags = [share * max(number, 1) - have for share, have in zip(listed, taken, strict=True)]
        chosen = lags.index(max(lags))
        of[number], index[number] = chosen, taken[chosen]
        taken[chosen] += 1
    return of, index


def write(prefix: str | Path, documents: Iterable[np.ndarray], dtype: Any = np.int32) -> None:
    """Write documents, each one sequence of token ids, as ``prefix.bin`` and ``prefix.idx``, which appear complete.

    Raises ``DataError`` for a type of tokens that the format does not have, or that does not hold a token, and for a
    document that is no row of whole numbers.
    """
    kind = np.dtype(dtype).newbyteorder("<")
    if kind not in _DTYPES or kind.kind == "f":
        raise DataError(
            f"tokens of type {np.dtype(dtype)} cannot be written; use one of {', '.join(map(str, _DTYPES))}"
        )
    lengths = array("i")
    temporary = [Path(f"{prefix}.{ending}.tmp") for ending in ("bin", "idx")]
    with temporary[0].open("wb") as file:
        for document in map(np.asarray, documents):
            if document.ndim != 1 or (document.size and document.dtype.kind not in "iu"):
                raise DataError(
                    f"document {len(lengths)} is {document.dtype} of the shape {document.shape}: give whole numbers [T]"
                )
            if len(document) and not np.iinfo(kind).min <= document.min() <= document.max() <= np.iinfo(kind).max:
                raise DataError(f"document {len(lengths)} has tokens that {kind.name} cannot hold; use another type")
            lengths.append(len(document))
            file.write(document.astype(kind).tobytes())
        file.flush()
        os.fsync(file.fileno())
    temporary[1].write_bytes(index(lengths, kind))
    for path in temporary:
        path.replace(path.with_suffix(""))


def index(lengths: Sequence[int], dtype: np.dtype) -> bytes:
    """Return the content of the ``.idx`` of documents with these lengths, each one sequence. uint32, which the format does
    not have, is called int32: ids are below 2**31."""
    kind = dtype.newbyteorder("<") if dtype != np.uint32 else np.dtype("<i4")
    sizes = np.array(lengths, dtype="<i4")
    starts = np.concatenate([[0], np.cumsum(sizes[:-1], dtype=np.int64)])[: len(sizes)] * kind.itemsize
    header = _HEADER.pack(_MAGIC, _VERSION, _DTYPES[kind], len(sizes), len(sizes) + 1)
    return header + sizes.tobytes() + starts.astype("<i8").tobytes() + np.arange(len(sizes) + 1, dtype="<i8").tobytes()
