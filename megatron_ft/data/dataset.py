"""From text to the tensors of a microbatch: ``prepare`` once, then ``PackedDataset`` in every rank.

A prepared directory holds ``tokens.bin`` (one stream of token ids, with an end-of-document id after each document),
``tokens.idx`` (with it, Megatron's readers open the same tokens: ``data.indexed``), ``tokenizer.model`` or
``tokenizer.json``, and ``meta.json``. ``meta.json`` is removed before another file is replaced, and put in place last, by
one rename: a directory that has it is complete, and one without it cannot be opened.

Assumed failures: ``prepare`` is killed at any instant, two of them run at once, a full disk, a directory copied in
part.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shlex
import shutil
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ft.data.corpus import (
    Corpus,
    StrPath,
    column_of_text,
    default_corpus,
    from_stream,
    has_text,
    read_documents,
)
from megatron_ft.data.indexed import check_ids, index, packed, probed
from megatron_ft.data.order import BatchSchedule, sample_indices
from megatron_ft.data.tokenizer import FILES, Tokenizer, train_tokenizer
from megatron_ft.data.tokenizer_pool import tokenize
from megatron_ft.errors import DataError
from megatron_ft.types import Microbatch
from megatron_ft.utils import cores, durable_file, lfs_pointer, shared_file

FORMAT_VERSION = 2
TOKENS, INDEX, META = "tokens.bin", "tokens.idx", "meta.json"
TRAINING_BYTES = 64 << 20  # text for training the tokenizer, spread evenly over the corpus; more changes little
VOCAB_SIZE = 4096
DOCUMENTS_PER_BATCH = 64
_STAGE_PREFIX = ".preparing-"


@dataclass(frozen=True)
class DatasetMeta:
    """The content of ``meta.json``.

    Attributes:
        format_version: Version of the format.
        dtype: Type of ``tokens.bin``: "uint16" or "uint32", little-endian.
        num_tokens: Number of tokens.
        num_documents: Number of documents.
        vocab_size: Number of token ids.
        eod_id: Token id that ends a document.
        source: Description of where the text came from.
        tokens_sha256: SHA-256 of ``tokens.bin``.
        tokens_probed: SHA-256 of pieces of it (``data.indexed.probed``), compared at each opening.
        tokenizer_sha256: SHA-256 of the tokenizer's file.
        request: The arguments of ``prepare``.
        eod_token: The token that ends a document.
        tokenizer_file: Name of the tokenizer's file: ``tokenizer.model`` or ``tokenizer.json``.
    """

    format_version: int
    dtype: str
    num_tokens: int
    num_documents: int
    vocab_size: int
    eod_id: int
    source: str
    tokens_sha256: str
    tokens_probed: str
    tokenizer_sha256: str
    request: dict[str, Any]
    eod_token: str
    tokenizer_file: str


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest type of ``tokens.bin`` that holds every id of a vocabulary. Raises ``DataError`` for more than
    2**31 ids, which Megatron's int32 does not hold."""
    if vocab_size > 2**31:
        raise DataError(f"a vocabulary of {vocab_size} token ids: 2**31 is the most that tokens.idx can describe")
    return np.dtype("<u2" if vocab_size <= 65535 else "<u4")


# ---------------------------------------------------------------------------------------------------------- prepare


def prepare(
    out: StrPath,
    text_files: Sequence[StrPath] | None = None,
    vocab_size: int | None = None,
    log: Callable[[str], object] = print,
    *,
    documents: Iterable[Mapping[str, Any]] | None = None,
    tokenizer: StrPath | None = None,
    eod_token: str | None = None,
    workers: int | None = None,
) -> DatasetMeta:
    """Tokenize a corpus into a directory for :class:`PackedDataset`, and for Megatron's readers (``OUT/tokens``).

    A second call with an equal tokenizer, or ``vocab_size``, and files of equal names, sizes and times returns at once.
    Another call prepares anew, and the old data stay usable until the new data are complete. Other files in ``out`` are not
    touched. Equal text and tokenizers, or ``vocab_size``, give equal bytes, whatever ``workers`` is.

    Args:
        out: Directory of the prepared dataset. It is created if it does not exist.
        text_files: ``.txt``, ``.jsonl`` or ``.parquet`` files (see ``read_documents``). None: State of the
            Union addresses.
        documents: In their place, rows with a field "text": a ``datasets.Dataset``, or a stream, which is read once, to its
            end. A stream is prepared anew in each call.
        vocab_size: Number of token ids of the tokenizer that is trained on the text. Default: 4096.
        log: Called with each message.
        tokenizer: A tokenizer to use in place of a trained one: see ``Tokenizer.load``.
        eod_token: Its token that ends a document. Default: the usual name that it has.
        workers: Number of processes that tokenize. Default: the cores that may be used.

    Returns:
        The description of the dataset.

    Raises:
        DataError: a file is missing, unreadable or without text, ``vocab_size`` or the tokenizer does not suit, a worker has
            died, or ``out`` cannot be written.
    """
    if documents is not None and text_files is not None:
        raise DataError("prepare has both text_files and documents: leave one of them out")
    _check_arguments(out, text_files, documents, vocab_size, tokenizer)
    given = _load_tokenizer(tokenizer, eod_token, vocab_size)
    if workers is not None and not (isinstance(workers, int | np.integer) and workers >= 1):
        raise DataError(f"--workers {workers} must be a whole number >= 1; leave it out for one process on each core")
    directory = Path(out)
    if directory.exists() and not directory.is_dir():
        raise DataError(f"--out {directory} is a file: name a directory, which is created if it does not exist")
    try:
        request = _request(text_files, documents, vocab_size, given)
        meta = _already_prepared(directory, request, log)  # before the lock: the directory may be read-only
        if meta is not None:
            return meta
        directory.mkdir(parents=True, exist_ok=True)
        with _stage(directory, log) as stage:
            meta = _already_prepared(directory, request, log)  # by the process that held the lock
            if meta is not None:
                return meta
            corpus = _corpus(text_files, documents, stage, log)
            meta = _build(
                stage, corpus, given or _train(corpus, request["vocab_size"]), request, workers or cores.usable(), log
            )
            _publish(stage, directory)
    except OSError as error:
        raise _cannot_prepare(directory, error) from error
    if blank := len(corpus.documents) - meta.num_documents:
        log(f"{blank} of {len(corpus.documents)} documents have no text and are left out")
    log(f"prepared {_summary(directory, meta)}")
    return meta


def _check_arguments(out: Any, text_files: Any, documents: Any, vocab_size: Any, tokenizer: Any) -> None:
    if isinstance(text_files, str | os.PathLike):
        raise DataError(f"prepare has text_files={str(text_files)!r}: give a list of files")
    for name, value in (("text_files", text_files), ("documents", documents)):
        if value is not None and not hasattr(value, "__iter__") and not hasattr(value, "__getitem__"):
            raise DataError(f"prepare has {name}={value!r}: give several of them, such as a list, or leave it out")
    if text_files is not None and not isinstance(text_files, Sequence):
        raise DataError(f"prepare has text_files of the type {type(text_files).__name__}: give a list of files")
    for path in (out, *(text_files or ()), *(() if tokenizer is None else (tokenizer,))):
        if not isinstance(path, str | os.PathLike) or "\0" in str(path) or not str(path):
            raise DataError(f"{path!r} is no path: name a file or directory by a text that is not empty")
    if vocab_size is not None and not isinstance(vocab_size, int | np.integer):
        raise DataError(f"--vocab-size {vocab_size!r} must be a whole number: use --vocab-size {VOCAB_SIZE}")


def _load_tokenizer(path: StrPath | None, eod_token: str | None, vocab_size: int | None) -> Tokenizer | None:
    if path is None:
        if eod_token is not None:
            raise DataError(f"--eod-token {eod_token} is for a --tokenizer of yours; the one that is trained has <eod>")
        return None
    if vocab_size is not None:
        raise DataError(f"--vocab-size {vocab_size} is for a tokenizer that is trained; leave it out with --tokenizer")
    return Tokenizer.load(path, eod_token)


def _cannot_prepare(directory: Path, error: OSError) -> DataError:
    while error.errno is None and isinstance(error.__context__, OSError):
        error = error.__context__  # HF datasets wraps the system's error
    where = f"{error.filename}: " if error.filename else ""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        remedy = "free space there or choose another --out"
    else:
        remedy = "check its permissions or choose another --out"
    return DataError(f"cannot prepare {directory}: {where}{error.strerror or error}: {remedy}")


def _summary(directory: Path, meta: DatasetMeta) -> str:
    return (
        f"{directory}: {meta.num_documents} documents, {meta.num_tokens} tokens, vocabulary {meta.vocab_size}, "
        f"each document ends with {meta.eod_token} ({meta.eod_id}), from {meta.source}"
    )


def _request(
    text_files: Sequence[StrPath] | None,
    documents: Iterable[Mapping[str, Any]] | None,
    vocab_size: int | None,
    given: Tokenizer | None,
) -> dict[str, Any]:
    """Return what identifies a request. Sizes and times represent the contents, because hashing a large corpus takes
    long; those of all its files represent a directory, and nothing represents a stream.

    A missing file gets -1; the error comes when it is read.
    """
    if given is None:
        how: dict[str, Any] = {"vocab_size": VOCAB_SIZE if vocab_size is None else vocab_size}
    else:
        how = {"tokenizer": hashlib.sha256(given.model).hexdigest(), "eod_token": given.eod_token}
    if documents is not None:
        return {"documents": getattr(documents, "_fingerprint", None), **how}
    if text_files is None:
        return {"corpus": "addresses.txt", **how}
    files = []
    for path in map(Path, text_files):
        for content in sorted(path.iterdir()) if path.is_dir() else [path]:
            status = content.stat() if content.exists() else None
            size, time_ns = (status.st_size, status.st_mtime_ns) if status else (-1, -1)
            files.append([str(content.resolve()), size, time_ns])
    return {"files": files, **how}


def _already_prepared(directory: Path, request: dict[str, Any], log: Callable[[str], object]) -> DatasetMeta | None:
    try:
        meta = read_meta(directory)
    except DataError:  # there is none, or it cannot be opened
        return None
    if meta.request != request or request.get("documents", "") is None:
        return None
    log(f"already prepared: {_summary(directory, meta)}")
    return meta


@contextmanager
def _stage(directory: Path, log: Callable[[str], object]) -> Iterator[Path]:
    """Create a temporary directory, and remove it after the block. A second ``prepare`` of ``directory`` (on another node,
    say) waits meanwhile, and then finds the work done.

    The lock ends with its process. On a network file system without locks both processes do the work, each in a directory
    of its own; where there is a lock, those of killed calls are removed. They are inside ``out``, and so on its file system
    even where ``out`` is a mount point: renaming moves the results.
    """
    with open(shared_file.open_to_lock(directory / ".lock"), "rb") as file:
        locked = shared_file.lock(file.fileno())
        if locked is False:
            holders = shared_file.lock_holders(file.fileno()) or "another process"
            log(f"{directory} is being prepared by {holders}: waiting for it")
            locked = shared_file.lock(file.fileno(), wait=True)
        for left_over in directory.glob(f"{_STAGE_PREFIX}*") if locked else ():
            shutil.rmtree(left_over, ignore_errors=True)
        stage = Path(tempfile.mkdtemp(prefix=_STAGE_PREFIX, dir=directory))
        try:
            yield stage
        finally:
            shutil.rmtree(stage, ignore_errors=True)


def _corpus(
    text_files: Sequence[StrPath] | None,
    documents: Iterable[Mapping[str, Any]] | None,
    stage: Path,
    log: Callable[[str], object],
) -> Corpus:
    from datasets import Dataset

    if isinstance(documents, Dataset):
        return Corpus(column_of_text(documents, "the dataset", stage / "dataset.arrow"), "a datasets.Dataset")
    if documents is not None:
        return Corpus(from_stream(documents, stage / "stream.arrow"), "a stream of documents")
    if text_files is None:
        return default_corpus()
    names, more = ", ".join(Path(file).name for file in text_files[:3]), len(text_files) - 3
    source = names + (f" and {more} more files" if more > 0 else "")
    return Corpus(read_documents(text_files, stage / "cache", log), source)


def _build(
    stage: Path,
    corpus: Corpus,
    tokenizer: Tokenizer,
    request: dict[str, Any],
    workers: int,
    log: Callable[[str], object],
) -> DatasetMeta:
    """Write the files into ``stage``, the meta file last."""
    dtype = token_dtype(tokenizer.vocab_size)
    with closing(tokenize(corpus.documents, tokenizer, dtype, workers, log)) as encoded:
        lengths, tokens_sha256 = _write_tokens(encoded, stage / TOKENS)
    durable_file.write(stage / INDEX, [index(lengths, dtype)])
    tokenizer_sha256 = durable_file.write(stage / tokenizer.file_name, [tokenizer.model])["sha256"]
    meta = DatasetMeta(
        format_version=FORMAT_VERSION,
        dtype=dtype.name,
        num_tokens=sum(lengths),
        num_documents=len(lengths),
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        source=corpus.source,
        tokens_sha256=tokens_sha256,
        tokens_probed=probed(stage / TOKENS),
        tokenizer_sha256=tokenizer_sha256,
        request=request,
        eod_token=tokenizer.eod_token,
        tokenizer_file=tokenizer.file_name,
    )
    durable_file.write(stage / META, [(json.dumps(asdict(meta), indent=2) + "\n").encode()])
    return meta


def _train(corpus: Corpus, vocab_size: int) -> Tokenizer:
    table = corpus.documents.data  # of which the documents may be a selection
    size = table.nbytes * len(corpus.documents) // max(len(table), 1)
    every = max(1, -(-size // TRAINING_BYTES))
    batches = corpus.documents.iter(batch_size=DOCUMENTS_PER_BATCH)
    texts = (text for batch in batches for text in batch["text"] if has_text(text))
    return train_tokenizer(texts, vocab_size, every=every)


def _write_tokens(encoded: Iterable[list[np.ndarray]], path: Path) -> tuple[array[int], str]:
    """Write the documents one after the other. Returns their lengths and the sha256 of the file."""
    lengths = array("i")

    def pieces() -> Iterator[bytes]:
        for documents in encoded:
            lengths.extend(map(len, documents))
            yield b"".join(tokens.tobytes() for tokens in documents)

    return lengths, durable_file.write(path, pieces())["sha256"]


def _publish(stage: Path, directory: Path) -> None:
    """Move the files into place. Until the last one is moved, the directory is incomplete and cannot be opened.

    Ranks that have the old tokens open continue to read the old file.
    """
    for name in (META, *FILES):
        (directory / name).unlink(missing_ok=True)
    for name in (TOKENS, INDEX, *FILES, META):
        if (stage / name).exists():
            os.replace(stage / name, directory / name)


# ---------------------------------------------------------------------------------------------------------- opening


def read_meta(path: StrPath) -> DatasetMeta:
    """Return the description of a prepared directory, after checking that it is complete.

    Raises ``DataError`` if it does not exist, is incomplete or damaged, or has another format version.
    """
    directory = Path(path)
    again = f"run `megatron-ft prepare --out {shlex.quote(str(directory))}`"
    if not directory.is_dir():
        raise DataError(f"{directory}: there is no prepared dataset: {again}")
    try:
        lfs_pointer.refuse(directory / META, DataError)
        raw = json.loads((directory / META).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"{directory}: not a complete dataset, {META} is missing: {again}") from error
    except OSError as error:
        raise DataError(f"{directory / META}: cannot be read ({error.strerror}): check its permissions") from error
    except ValueError as error:
        raise DataError(f"{directory}: {META} is damaged ({error}): {again}") from error
    version = raw.get("format_version") if isinstance(raw, dict) else None
    if version != FORMAT_VERSION:
        raise DataError(f"{directory}: format version {version}, this program reads {FORMAT_VERSION}: {again}")
    try:
        raw.pop("fallback", None)  # earlier versions wrote it
        meta = DatasetMeta(**raw)
        _check_files(directory, meta)
    except (TypeError, ValueError) as error:
        raise DataError(f"{directory}: damaged ({error}): {again}") from error
    return meta


def _check_files(directory: Path, meta: DatasetMeta) -> None:
    """Raise ``ValueError`` for files that are not those of the description, ``DataError`` for a pointer of Git LFS. Of the
    tokens only pieces are read, because every rank would wait for it at every start."""
    expected = meta.num_tokens * np.dtype(meta.dtype).itemsize
    tokens = directory / TOKENS
    lfs_pointer.refuse(tokens, DataError)
    size = tokens.stat().st_size if tokens.is_file() else 0
    if size != expected or not expected:
        raise ValueError(f"{TOKENS} has {size} bytes, {META} says {expected}")
    if np.dtype(meta.dtype) != token_dtype(meta.vocab_size) or not 0 <= meta.eod_id < meta.vocab_size:
        raise ValueError(
            f"{META} has {meta.vocab_size} token ids in {meta.dtype}, the one that ends a document is {meta.eod_id}"
        )
    if probed(tokens) != meta.tokens_probed:
        raise ValueError(f"{TOKENS} has other tokens than those of {META}")
    if not (directory / meta.tokenizer_file).is_file():
        raise ValueError(f"{meta.tokenizer_file} is missing")


class PackedDataset:
    """The samples of each microbatch as tensors, from a prepared directory. Samples have no padding.

    Sample i predicts the ``seq_len`` tokens after each of ``tokens[i*seq_len : (i+1)*seq_len]``, across document ends. With
    ``documents`` a batch also has ``document_ids``, numbers that differ between the documents of a sample, from 0, and
    ``position_ids``, which begin anew in each document and each sample; an end-of-document id belongs to the document before
    it. Attention within a document only is where two ``document_ids`` are equal. The label of an end-of-document id, which
    is of the next document, is then ``data.indexed.IGNORED_LABEL``.
    The order of the ``num_samples`` samples in each data epoch follows from ``seed`` (see ``data.order``). Tokens are
    mapped from the file, so ranks of one node share the memory. All groups must have the same arguments and the same
    data, which is checked through ``identity``.

    Args:
        path: The prepared directory.
        seq_len: Number of tokens in a sample, >= 1.
        samples_per_microbatch: Number of samples in a microbatch, >= 1.
        groups: N, the number of shards in a step, >= 1; not the number of live groups.
        microbatches_per_group: G, the number of microbatches in a shard, >= 1, or the numbers of all steps.
        seed: Seed of the order.
        documents: Whether samples say which document each token is of. Default: no.

    Raises:
        DataError: the directory is missing, incomplete or damaged, or has too few tokens for ``seq_len``.
        ValueError: a number is below 1, or no whole number.
    """

    read_ahead = True
    """See ``data.prefetch.Dataset``."""

    def __init__(
        self,
        path: StrPath,
        seq_len: int,
        samples_per_microbatch: int,
        groups: int,
        microbatches_per_group: int | BatchSchedule,
        seed: int,
        *,
        documents: bool = False,
    ) -> None:
        self._sizes = BatchSchedule.of(microbatches_per_group)
        self.microbatches_per_group = self._sizes.at(0)
        for number in (seq_len, samples_per_microbatch, groups, self.microbatches_per_group):
            if not isinstance(number, int | np.integer) or number < 1:
                raise ValueError(
                    f"must be whole numbers >= 1: {seq_len=}, {samples_per_microbatch=}, {groups=}, "
                    f"{microbatches_per_group=}"
                )
        self.meta = read_meta(path)
        largest = self.meta.num_tokens - 1
        if seq_len > largest:
            raise DataError(
                f"sequence length {seq_len} is more than the text of {path} allows: use {largest} or less, or more text"
            )
        self.seq_len = seq_len
        self.samples_per_microbatch = samples_per_microbatch
        self.groups = groups
        self.seed = seed
        self._says_documents = documents
        self.tokens_per_microbatch = samples_per_microbatch * seq_len
        self.num_samples = largest // seq_len
        dtype = np.dtype(self.meta.dtype).newbyteorder("<")
        try:
            self._tokens = np.memmap(Path(path) / TOKENS, dtype=dtype, mode="r", shape=(self.meta.num_tokens,))
        except OSError as error:
            raise DataError(f"{Path(path) / TOKENS}: cannot be read ({error.strerror}): check permissions") from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids. Every id is in ``range(vocab_size)``."""
        return self.meta.vocab_size

    @property
    def fingerprint(self) -> str:
        """The sha256 of the tokens, computed when they were prepared. It is equal for equal tokens."""
        return self.meta.tokens_sha256

    @property
    def identity(self) -> dict[str, Any]:
        """Everything that determines the samples of a microbatch, with names for messages. All ranks of a run compare
        it."""
        said = {"documents of the tokens": True} if self._says_documents else {}
        return {
            "dataset fingerprint": self.fingerprint,
            "tokenizer": self.meta.tokenizer_sha256,
            "sequence length": self.seq_len,
            "seed of the dataset": self.seed,
            "samples per microbatch of the dataset": self.samples_per_microbatch,
            "microbatches per shard of the dataset": self.microbatches_per_group,
            "shards of the dataset": self.groups,
            **said,
        }

    def indices(self, microbatch: Microbatch) -> np.ndarray:
        """Return the sample numbers of a microbatch: int64 ``[samples_per_microbatch]``.

        Raises ``ValueError`` for an impossible id.
        """
        return sample_indices(
            microbatch,
            groups=self.groups,
            microbatches_per_group=self._sizes,
            samples_per_microbatch=self.samples_per_microbatch,
            num_samples=self.num_samples,
            seed=self.seed,
        )

    def sample(self, index: int) -> np.ndarray:
        """Return the tokens of one sample: int64 ``[seq_len + 1]``; the last one is only a label."""
        if not 0 <= index < self.num_samples:
            raise ValueError(f"sample {index} is outside range({self.num_samples})")
        start = int(index) * self.seq_len
        return self._tokens[start : start + self.seq_len + 1].astype(np.int64)

    def get(self, microbatch: Microbatch) -> dict[str, torch.Tensor]:
        """Return ``input_ids`` and ``labels``, each int64 ``[samples_per_microbatch, seq_len]`` on the CPU, contiguous; with
        ``documents`` also ``document_ids`` and ``position_ids``, of the same type and shape.

        ``labels[b, t]`` is the token after ``input_ids[b, t]``, or ``IGNORED_LABEL`` (see the class). Raises ``ValueError``
        for an impossible id.
        """
        return self._batch(np.stack([self.sample(index) for index in self.indices(microbatch).tolist()]))

    __call__ = get

    def _batch(self, tokens: np.ndarray) -> dict[str, torch.Tensor]:
        """Return the batch of samples, int64 ``[..., seq_len + 1]``. Raises ``DataError`` for an id outside of the
        vocabulary: the file has changed."""
        check_ids(tokens, self.meta.vocab_size, TOKENS)
        return packed(tokens, tokens[..., :-1] == self.meta.eod_id if self._says_documents else None)

    def __len__(self) -> int:
        """Return the number of samples, each of which :meth:`__getitem__` returns."""
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one sample as :meth:`get` returns a batch, without the first axis; for ``session.evaluate``."""
        return self._batch(self.sample(index))
