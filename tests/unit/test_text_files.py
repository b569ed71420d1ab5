"""Files of text as they are found: what other fields hold does not matter, and a bad row is named by its number."""

from __future__ import annotations

import gzip
import json
import os

import pyarrow
import pyarrow.parquet
import pytest
from datasets import Dataset
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ft.data import prepare, read_documents
from megatron_ft.data.text_files import texts
from megatron_ft.errors import DataError


def lines(*rows):
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows).encode()


LATE = [{"text": "x" * 6000, "note": None}] * 2000  # more than a reader that infers types looks at
OTHERS = pyarrow.array([[("a", 1)], [], None], pyarrow.map_(pyarrow.string(), pyarrow.int64()))


@pytest.mark.parametrize(
    ("name", "content", "wanted"),
    [
        ("null-first.jsonl", lines(*LATE, {"text": "end", "note": "x"}), [*["x" * 6000] * 2000, "end"]),
        (
            "changing.jsonl",
            lines({"text": "a", "n": 1}, {"text": "b", "n": {"m": []}}, {"text": "c", "n": "d"}),
            ["a", "b", "c"],
        ),
        ("late.jsonl", lines({"text": "a"}, {"lang": "en", "text": None}, {"lang": 1}), ["a", None, None]),
        ("text-late.jsonl", lines({"id": 1}, {"id": 2, "text": "a"}), [None, "a"]),
        ("dates.ndjson", lines({"text": "2020-01-01 00:00:00"}, "", {"text": "1"}), ["2020-01-01 00:00:00", "1"]),
        ("numbers.jsonl", lines('{"text": "a", "n": ' + "9" * 5000 + "}", '{"text": "b", "n": NaN}'), ["a", "b"]),
        ("crlf.jsonl", b'\xef\xbb\xbf{"text": "a\\r\\n"}\r\n\r\n{"text": "b"}', ["a\r\n", "b"]),
        ("c4.00000-of-01024.json.gz", gzip.compress(lines({"text": "a"}, {"text": "b"}), mtime=0), ["a", "b"]),
        ("bom.txt", "\ufeffnaïve\r\n".encode(), ["naïve\n"]),
        ("t.parquet", {"text": pyarrow.array(["a", None, "c"]), "others": OTHERS}, ["a", None, "c"]),
        ("view.parquet", {"text": pyarrow.array(["a", "b" * 99], pyarrow.string_view())}, ["a", "b" * 99]),
        ("dictionary.parquet", {"text": pyarrow.array(["a", "a", None]).dictionary_encode()}, ["a", "a", None]),
        ("dotted.parquet", {"text.x": ["no"], "text": pyarrow.array(["a"], pyarrow.large_string())}, ["a"]),
        ("no-rows.parquet", {"text": pyarrow.array([], pyarrow.string())}, []),
    ],
)
def test_only_the_text_of_a_row_matters(tmp_path, name, content, wanted):
    if isinstance(content, dict):
        pyarrow.parquet.write_table(pyarrow.table(content), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    assert list(texts(tmp_path / name)) == wanted


HALF = '{"text": "half \\ud83d pair"}'
MANY = [{"text": "x" * 5000}] * 3000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("half.jsonl", lines(*MANY, HALF, "no"), r"half\.jsonl: line 3001 .*half of a surrogate pair"),
        ("cut.jsonl", lines({"text": "a"}) + b'\n{"text": "b', r"line 3 .*Unterminated string .* at column 10"),
        (
            "latin.jsonl.gz",
            gzip.compress(lines({"text": "a"}) + b'{"text": "\xe9"}', mtime=0),
            r"line 2 .*\.gz .*utf-8.*UTF-8",
        ),
        ("array.json", b'[{"text": "a"},\n{"text": "b"}]', r"line 1 .*each line must be one JSON object"),
        ("row.json", b'[{"text": "a"}]', r"line 1 .*it is a list.*each line must be one JSON object"),
        ("deep.jsonl", lines({"text": "a"}) + b'{"n":' * 100_000, r"line 2 .*recursion"),
        ("body.jsonl", lines({"body": "a"}, {"b": 1}), r'has no field "text", only \[\'body\', \'b\'\]'),
        ("long.jsonl", lines(*[{"body": 1}] * 10_001) + b"no", r'has no field "text", only \[\'body\'\]'),
        ("number.parquet", {"text": [1]}, r'"text" holds int64, not strings'),
        ("body.parquet", {"body": ["a"]}, r"only \['body'\]"),
        ("nested.parquet", {"text": [{"en": "a"}]}, r'"text" holds struct.*, not strings'),
    ],
)
def test_a_bad_row_is_named_by_its_number(tmp_path, name, content, message):
    if isinstance(content, dict):
        pyarrow.parquet.write_table(pyarrow.table(content), tmp_path / name)
    else:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        list(texts(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_row_of_parquet_that_is_not_utf8_is_named(tmp_path):
    bad = pyarrow.array([b"a"] * 1500 + [b"\xff"], pyarrow.binary()).view(pyarrow.string())
    pyarrow.parquet.write_table(pyarrow.table({"text": bad}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"row 1500, counted from 0, cannot be read .*utf-8"):
        list(texts(tmp_path / "t.parquet"))


@given(st.lists(st.none() | st.text(max_size=9), max_size=20), st.sampled_from(["\n", "\r\n", "\n \n"]), st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_any_text_is_read_as_it_was_written(tmp_path, written, ending, ascii_only):
    rows = [json.dumps({"n": text, "text": text}, ensure_ascii=ascii_only) + ending for text in written]
    (tmp_path / "t.jsonl").write_bytes("".join(rows).encode())
    assert list(texts(tmp_path / "t.jsonl")) == written


def test_parts_without_rows_are_left_out_and_said(tmp_path):
    said = []
    for name, rows in (("empty", []), ("full", ["a", "b"])):
        table = pyarrow.table({"text": pyarrow.array(rows, pyarrow.string())})
        pyarrow.parquet.write_table(table, tmp_path / f"{name}.parquet")
    parts = [tmp_path / f"{name}.parquet" for name in ("empty", "full", "empty")]
    assert read_documents(parts, tmp_path / "cache", said.append)["text"] == ["a", "b"]
    assert said == [f"{parts[0]}: has no rows, it is left out"] * 2
    with pytest.raises(DataError, match=r"empty\.parquet: no rows, and so no text"):
        read_documents(parts[:1], tmp_path / "cache", said.append)


def test_nothing_is_written_beside_a_saved_dataset(tmp_path):
    table = pyarrow.table({"text": pyarrow.array(["a", "b", "c"], pyarrow.large_string())})
    Dataset(table).select([2, 0]).save_to_disk(tmp_path / "saved")
    before = sorted(path.name for path in (tmp_path / "saved").iterdir())
    assert read_documents([tmp_path / "saved"], tmp_path / "cache")["text"] == ["c", "a"]
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == before


@pytest.mark.parametrize("name", ["a.txt", "b.jsonl", "c.parquet", "d.json.gz", "saved"])
def test_a_pointer_of_git_lfs_is_told(tmp_path, name):
    path = tmp_path / name
    if name == "saved":
        Dataset.from_dict({"text": ["a"]}).save_to_disk(path)
        path = next(path.glob("*.arrow"))
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 17\n")
    with pytest.raises(DataError, match=rf"{path}: is a pointer of Git LFS.*run `git lfs pull`"):
        read_documents([tmp_path / name], tmp_path / "cache")


def test_a_saved_dataset_that_has_changed_is_prepared_anew(tmp_path):
    Dataset.from_dict({"text": ["first document", "second"]}).save_to_disk(tmp_path / "saved")
    said = []
    for _ in range(2):
        prepare(tmp_path / "out", [tmp_path / "saved"], 280, said.append)
    state = tmp_path / "saved" / "state.json"
    kept, times = state.read_bytes(), state.stat()
    Dataset.from_dict({"text": ["first document", "a third"]}).save_to_disk(tmp_path / "saved")
    state.write_bytes(kept)
    os.utime(state, ns=(times.st_atime_ns, times.st_mtime_ns))
    prepare(tmp_path / "out", [tmp_path / "saved"], 280, said.append)
    assert [line.split()[0] for line in said] == ["prepared", "already", "prepared"]
