"""Documents as people have them: compressed files, Hugging Face datasets and streams; and none of it read in part."""

from __future__ import annotations

import gzip
import json

import numpy as np
import pyarrow
import pytest
from datasets import Dataset, DatasetDict, IterableDataset
from torch.utils.data import DataLoader

from megatron_ft.data import PackedDataset, Tokenizer, prepare, read_meta, text_files
from megatron_ft.data.loader import Loader, of_dataloader
from megatron_ft.errors import ConfigError, DataError
from megatron_ft.types import Microbatch

TEXT = "\n".join(f"The {number}. day was as long as the day before it, and nobody counted." for number in range(40))
ROWS = [{"text": TEXT, "id": 1}, {"text": None, "id": 2}, {"text": "second\nline", "id": 3}]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


def zstd(content: bytes) -> bytes:
    return pyarrow.compress(content, codec="zstd", asbytes=True)


def prepared(tmp_path, *files, log=lambda line: None, **options):
    return prepare(tmp_path / "out", files or None, 310, log, **options)


def texts(tmp_path):
    meta, tokenizer = read_meta(tmp_path / "out"), Tokenizer.load(tmp_path / "out")
    tokens = np.fromfile(tmp_path / "out" / "tokens.bin", dtype=meta.dtype)
    return [tokenizer.decode(part[:-1]) for part in np.split(tokens, np.flatnonzero(tokens == meta.eod_id) + 1)[:-1]]


def test_compressed_files_and_saved_datasets_are_read_in_order(tmp_path):
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(LINES[:40]) + gzip.compress(LINES[40:]))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.jsonl.zst").write_bytes(zstd(json.dumps({"text": "by zstd"}).encode()))
    (tmp_path / "b.TXT.GZ").write_bytes(gzip.compress(b"one\ndocument"))
    Dataset.from_list(ROWS[::-1]).save_to_disk(tmp_path / "saved")
    prepared(tmp_path, *(tmp_path / name for name in ("a.jsonl.gz", "saved", "other/a.jsonl.zst", "b.TXT.GZ")))
    assert texts(tmp_path) == [TEXT, "second\nline", "second\nline", TEXT, "by zstd", "one\ndocument"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("cut.jsonl.gz", gzip.compress(LINES, mtime=0)[:-9], r"cut\.jsonl\.gz: it cannot be read as \.gz \(Truncated"),
        ("no.jsonl.zst", b"not compressed", r"no\.jsonl\.zst: it cannot be read as \.zst \("),
        ("t.parquet.gz", b"x", r"t\.parquet\.gz: cannot read files ending in '\.gz'"),
        (
            "broken.jsonl.gz",
            gzip.compress(b'{"text": "x"}\nno', mtime=0),
            r"broken\.jsonl\.gz: line 2 cannot be read as .*Expecting value at column 1",
        ),
        ("directory", None, r"directory: is no directory of a dataset .*save_to_disk"),
    ],
)
def test_each_bad_input_is_named_and_nothing_of_it_is_used(tmp_path, name, content, message):
    (tmp_path / name).mkdir() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        prepared(tmp_path, tmp_path / name)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


def test_of_a_dataset_with_splits_one_is_named(tmp_path):
    DatasetDict(train=Dataset.from_list(ROWS)).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=r"has several splits: name one of .*saved/train"):
        prepared(tmp_path, tmp_path / "saved")
    prepared(tmp_path, tmp_path / "saved" / "train")
    assert texts(tmp_path) == [TEXT, "second\nline"]


def test_a_large_compressed_text_is_refused_as_a_plain_one_is(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_TXT_BYTES", 100)
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(b"a " * 100))
    with pytest.raises(DataError, match=r"a\.txt\.gz: 101 bytes or more are more than one document can hold"):
        prepared(tmp_path, tmp_path / "a.txt.gz")


def test_a_dataset_object_is_prepared_once_and_a_stream_in_each_call(tmp_path):
    lines, dataset = [], Dataset.from_list(ROWS).select([2, 0])
    first = prepared(tmp_path, documents=dataset, log=lines.append)
    assert prepared(tmp_path, documents=dataset, log=lines.append) == first and lines[1].startswith("already")
    assert texts(tmp_path) == ["second\nline", TEXT]
    stream = Dataset.from_list(ROWS).to_iterable_dataset()
    for number in (3, 2):
        prepared(tmp_path, documents=stream.take(number), log=lines.append)
        assert texts(tmp_path) == [TEXT, "second\nline"][: number - 1]
    plain = prepared(tmp_path, documents=({"text": f"{number} {TEXT}"} for number in range(3000)))
    assert plain.num_documents == 3000 and texts(tmp_path)[2999] == f"2999 {TEXT}"


def test_a_stream_that_fails_leaves_the_old_data(tmp_path):
    def rows():
        yield from ROWS
        raise ConnectionError("the server went away")

    first = prepared(tmp_path, documents=iter(ROWS))
    with pytest.raises(DataError, match="failed after 3 of them .*server went away.*prepare again"):
        prepared(tmp_path, documents=IterableDataset.from_generator(rows))
    for bad, said in (([{"body": "x"}], "document 0 of"), ([{"text": "x"}, "y"], "document 1 of"), ([], "only blanks")):
        with pytest.raises(DataError, match=said):
            prepared(tmp_path, documents=bad)
    with pytest.raises(DataError, match="both text_files and documents"):
        prepared(tmp_path, tmp_path / "a.txt", documents=ROWS)
    assert read_meta(tmp_path / "out") == first and PackedDataset(tmp_path / "out", 16, 1, 1, 1, 0)


def test_the_samples_of_a_dataset_are_asked_for_together():
    dataset, shape = Dataset.from_dict({"number": range(20)}).with_format("torch"), {"groups": 2, "seed": 1}
    loader = Loader(dataset, microbatches_per_group=2, samples_per_microbatch=3, **shape)
    asked = []
    several = dataset.__getitems__
    dataset.__getitems__ = lambda keys: asked.append(keys) or several(keys)
    microbatch = Microbatch(1, 1, 0)
    assert loader(microbatch)["number"].tolist() == loader.indices(microbatch) == asked[0]


def test_a_streaming_dataset_is_refused_with_the_way_to_use_it():
    stream = Dataset.from_dict({"number": range(20)}).to_iterable_dataset()
    for use in (
        lambda: Loader(stream, groups=1, microbatches_per_group=1, samples_per_microbatch=1, seed=1),
        lambda: of_dataloader(DataLoader(stream, batch_size=2), 2),
    ):
        with pytest.raises(
            ConfigError, match=r"a IterableDataset has no dataset\[index\].*prepare\(directory, documents"
        ):
            use()
