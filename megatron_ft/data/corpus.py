"""The text: the user's files, a dataset or stream of Hugging Face ``datasets``, or twelve State of the Union addresses
(``addresses.txt``: Washington's and Lincoln's, 260 KB, public domain), so that a first run needs no data.

Assumed failures: files that are missing, empty, cut short or not UTF-8.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ft.data import text_files
from megatron_ft.errors import DataError

if TYPE_CHECKING:  # importing `datasets` takes a second: only preparing pays for it, not every rank that reads tokens
    from datasets import Dataset

_BATCH_CHARS = 1 << 24
_BATCH_DOCUMENTS = 1000

StrPath = str | os.PathLike[str]


@dataclass(frozen=True)
class Corpus:
    """Documents, a ``datasets.Dataset`` with the column "text".

    ``source`` describes where they come from.
    """

    documents: Dataset
    source: str


def read_documents(files: Sequence[StrPath], cache_dir: StrPath, log: Callable[[str], object] = print) -> Dataset:
    """Read text files into one ``datasets.Dataset`` with the single column "text" (string), in the order given.

    ``.txt`` (UTF-8): the file is one document. ``.jsonl``, ``.json`` or ``.ndjson``: the field "text" of each line. All of
    these may be compressed, with a further ending ``.gz`` or ``.zst``. ``.parquet``: the column "text". A directory: a
    dataset that ``save_to_disk`` has written. Other fields are not read. A file without rows is left out, and ``log`` gets a
    line. Arrow files are written to ``cache_dir``, which must exist while the result is used.

    Raises ``DataError`` for a file that is missing, unreadable, empty, of another kind, undecodable or without text.
    """
    from datasets import concatenate_datasets

    paths = [Path(file) for file in files]
    if not paths:
        raise DataError("no text files given: name at least one .txt, .jsonl or .parquet file, or none for the default")
    for path in paths:  # before the first is read: a typo in the last name must not cost an hour
        text_files.check_file(path)
    Path(cache_dir).mkdir(exist_ok=True)
    parts = []
    for number, path in enumerate(paths):
        arrow = Path(cache_dir) / f"{number}.arrow"
        part = _saved(path) if path.is_dir() else _to_arrow(text_files.texts(path), arrow)
        if len(part):
            parts.append(column_of_text(part, str(path), arrow))
        else:
            log(f"{path}: has no rows, it is left out")
    if not parts:
        raise DataError(f"{', '.join(map(str, paths))}: no rows, and so no text: check how they were written")
    return concatenate_datasets(parts)


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


def column_of_text(documents: Dataset, name: str, arrow: Path) -> Dataset:
    """Return the column "text" alone, as strings, which are written to the file ``arrow`` where they were large ones. Raises
    ``DataError`` if it is missing, of another type, or blank."""
    from datasets import Value

    if "text" not in documents.column_names:
        raise text_files.no_text_field(name, documents.column_names)
    documents = documents.select_columns("text").with_format(None)
    kind = documents.features["text"]
    if kind not in (Value("string"), Value("large_string")):
        raise DataError(f'{name}: "text" holds {getattr(kind, "dtype", kind)}, not strings: convert that field')
    if not any(has_text(text) for batch in documents.iter(batch_size=64) for text in batch["text"]):
        raise DataError(f"{name}: holds only blanks: leave it out, or check how it was written")
    if kind == Value("string"):
        return documents
    # Not cast_column, which writes beside the user's files.
    return _to_arrow((text for batch in documents.iter(batch_size=64) for text in batch["text"]), arrow)


def from_stream(rows: Iterable[Mapping[str, Any]], path: Path) -> Dataset:
    """Write the field "text" of all rows to the Arrow file ``path``, and open it. Raises ``DataError`` for a row without
    it."""
    return column_of_text(_to_arrow(_texts_of_rows(rows), path), "the stream of documents", path)


def _texts_of_rows(rows: Iterable[Mapping[str, Any]]) -> Iterator[str | None]:
    """Yield the texts. An ``OSError`` of the rows is raised as ``DataError``, as it says nothing about the prepared
    directory."""
    number = -1
    try:
        for number, row in enumerate(rows):
            text = row.get("text", 0) if isinstance(row, Mapping) else 0
            if not isinstance(text, str | None):
                raise DataError(
                    f'document {number} of the stream has no string "text" (it is a {type(row).__name__}): give rows '
                    '{"text": ...}, e.g. by rename_column'
                )
            if text is not None and not text_files.is_unicode(text):
                raise DataError(f"document {number} of the stream has half of a surrogate pair: encode its text again")
            yield text
    except OSError as error:
        raise DataError(
            f"the stream of documents failed after {number + 1} of them ({error!r}), nothing of it is used: prepare again"
        ) from error


def _to_arrow(texts: Iterable[str | None], path: Path) -> Dataset:
    """Write texts to the Arrow file ``path``, and open it."""
    import pyarrow
    from datasets import Dataset

    schema = pyarrow.schema({"text": pyarrow.string()})
    batch: list[str | None] = []
    chars = 0
    with pyarrow.OSFile(str(path), "wb") as file, pyarrow.ipc.new_stream(file, schema) as writer:

        def write() -> None:
            writer.write_batch(pyarrow.record_batch([pyarrow.array(batch, pyarrow.string())], schema=schema))
            batch.clear()

        for text in texts:
            batch.append(text)
            chars += len(text or "")
            if len(batch) == _BATCH_DOCUMENTS or chars >= _BATCH_CHARS:
                write()
                chars = 0
        write()
    return Dataset.from_file(str(path))


def has_text(text: str | None) -> bool:
    """Return whether a document has text. Null and blank documents are left out everywhere."""
    return text is not None and not text.isspace() and text != ""


def default_corpus() -> Corpus:
    """Return the text that comes with the package."""
    from datasets import Dataset

    text = resources.files("megatron_ft.data").joinpath("addresses.txt").read_bytes().decode("utf-8")
    texts = text.split("\f")
    return Corpus(Dataset.from_dict({"text": texts}), f"{len(texts)} State of the Union addresses")
