"""The texts of one file: ``.txt``, JSON lines or parquet. Only the field "text" of a row is read, whatever the others hold.

Assumed failures: files that are missing, empty, cut short, of another kind, or not UTF-8, all or a single row of them.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

from megatron_ft.errors import DataError
from megatron_ft.utils import lfs_pointer

if TYPE_CHECKING:
    import pyarrow

MAX_TXT_BYTES = 2**31 - 2**20  # a .txt file is one document, and one Arrow string holds less than 2 GiB
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
"""Endings that may follow those of text and of JSON lines."""
_ROWS_WITHOUT_TEXT = 10_000
"""Rows without the field, from the first on, after which a file counts as one that does not have it."""
_ROWS_PER_BATCH = 1000


def kind(path: Path) -> str:
    """Return the ending that says how to read a file, without that of a compression."""
    suffix = path.suffix.lower()
    return Path(path.stem).suffix.lower() if suffix in COMPRESSIONS else suffix


def check_file(path: Path) -> None:
    """Check what can be seen without reading a file, or those of a directory. Raises ``DataError``."""
    for each in path.iterdir() if path.is_dir() else [path]:
        lfs_pointer.refuse(each, DataError)
    if path.is_dir():
        return
    if kind(path) not in _READERS or (kind(path) == ".parquet" and path.suffix.lower() in COMPRESSIONS):
        raise DataError(
            f"{path}: cannot read files ending in {path.suffix!r}: convert it to .txt, .jsonl or .parquet, the first two "
            f"with {' or '.join(COMPRESSIONS)} if compressed"
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


def texts(path: Path) -> Iterator[str | None]:
    """Yield the text of each row of a checked file, in order, None where it is null or left out.

    Raises ``DataError`` for a file that is unreadable, undecodable or without the field, and names the line or row; and
    ``OSError`` for what the system reports.
    """
    import pyarrow

    try:
        yield from _READERS[kind(path)](path)
    except (pyarrow.ArrowException, ValueError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system, not of a decompressor
            raise
        _unreadable(path, "it", error, "it must be intact and in UTF-8")


def is_unicode(text: str) -> bool:
    """Return whether a text can be encoded: it has no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def no_text_field(name: str, fields: Collection[str]) -> DataError:
    """Return the error for rows without the field "text"."""
    return DataError(f'{name}: has no field "text", only {list(fields)}: rename the field that holds the text')


def _txt(path: Path) -> Iterator[str]:
    with _opened(path) as file:
        content = file.read(MAX_TXT_BYTES + 1)
    _check_length(path, len(content))
    yield io.TextIOWrapper(io.BytesIO(content), encoding="utf-8-sig").read()


def _json_lines(path: Path) -> Iterator[str | None]:
    found, fields = False, {}
    rule = 'each line must be one JSON object in UTF-8, such as {"text": "..."}'
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if line.isspace():
                continue
            try:
                row = json.loads(line.decode("utf-8-sig"), parse_int=float)  # int refuses more than 4,300 digits
                if not isinstance(row, dict):
                    raise ValueError(f"it is a {type(row).__name__}")
                text = row.get("text")
                if not isinstance(text, str | None):
                    raise ValueError(f'"text" is a {type(text).__name__}, not a string')
                if text is not None and not is_unicode(text):
                    raise ValueError("it has half of a surrogate pair")
            except (ValueError, RecursionError) as error:
                _unreadable(path, f"line {number}", error, rule)
            found = found or "text" in row
            if not found:
                fields.update(dict.fromkeys(row))
                if number > _ROWS_WITHOUT_TEXT:
                    break
            yield text
    if fields and not found:
        raise no_text_field(str(path), fields)


def _parquet(path: Path) -> Iterator[str | None]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        schema = file.schema_arrow
        if "text" not in schema.names:
            raise no_text_field(str(path), schema.names)
        if schema.names.count("text") > 1:
            raise DataError(f'{path}: has the column "text" {schema.names.count("text")} times: rename the others')
        column = schema.field("text").type
        if not _holds_strings(column):
            raise DataError(f'{path}: "text" holds {column}, not strings: convert that field')
        number = 0
        for batch in file.iter_batches(batch_size=_ROWS_PER_BATCH, columns=["text"]):
            for value in batch.column("text"):
                try:
                    text = value.as_py()
                except ValueError as error:
                    _unreadable(path, f"row {number}, counted from 0,", error, "its text must be in UTF-8")
                yield text
                number += 1


def _holds_strings(column: pyarrow.DataType) -> bool:
    from pyarrow import types

    if types.is_dictionary(column):
        return _holds_strings(column.value_type)
    return (
        types.is_string(column)
        or types.is_large_string(column)
        or types.is_string_view(column)
        or types.is_null(column)
    )


_READERS: dict[str, Callable[[Path], Iterator[str | None]]] = {
    ".txt": _txt,
    ".jsonl": _json_lines,
    ".json": _json_lines,
    ".ndjson": _json_lines,
    ".parquet": _parquet,
}


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    """Open a file for its content, decompressed."""
    import pyarrow

    compression = COMPRESSIONS.get(path.suffix.lower())
    with path.open("rb") as plain:
        if compression is None:
            yield plain
        else:
            stream: Any = pyarrow.CompressedInputStream(plain, compression)
            with io.BufferedReader(stream, 1 << 20) as file:
                yield file


def _check_length(path: Path, size: int) -> None:
    if size > MAX_TXT_BYTES:
        raise DataError(
            f"{path}: {size} bytes or more are more than one document can hold ({MAX_TXT_BYTES}): split the file, or write "
            'it as .jsonl with one document {"text": ...} on each line'
        )


def _unreadable(path: Path, part: str, error: BaseException, rule: str) -> NoReturn:
    if isinstance(error, json.JSONDecodeError):
        detail = f"{error.msg} at column {error.colno}"  # its own line number is always 1
    else:
        detail = " ".join(str(error).split())[:200]
    raise DataError(f"{path}: {part} cannot be read as {path.suffix.lower()} ({detail}): {rule}") from error
