"""Corpus -> tokenizer -> packed dataset: no text is lost, and no half-written dataset ever opens."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import threading

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft.data import (
    PackedDataset,
    Tokenizer,
    dataset,
    indexed,
    prepare,
    read_meta,
    text_files,
    train_tokenizer,
)
from megatron_ft.errors import DataError
from megatron_ft.types import Microbatch

TEXT = "\n".join(f"The {number}. day was as long as the day before it, and nobody counted." for number in range(40))
ODD = "  two  spaces\t\ttab\n\n\nnewlines \u2581 a space mark\r\nÄÖ 漢字 🎉 e\u0301 \0 <eod> <0x0A> </s> \ufeff \u2585 "
VOCAB = 310
SHAPE = {"seq_len": 16, "samples_per_microbatch": 2, "groups": 2, "microbatches_per_group": 3, "seed": 7}


@pytest.fixture
def text_file(tmp_path):
    file = tmp_path / "text.txt"
    file.write_text(TEXT, encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT, ODD], VOCAB)


def quiet(line):
    """Discard the messages, in tests that do not check them."""


def documents_in(directory):
    """The texts of a prepared directory, read back from its files."""
    meta, tokenizer = read_meta(directory), Tokenizer.load(directory)
    tokens = np.fromfile(directory / "tokens.bin", dtype=meta.dtype)
    assert len(tokens) == meta.num_tokens and tokens.max() < meta.vocab_size
    assert tokens[-1] == meta.eod_id == tokenizer.eod_id
    parts = np.split(tokens, np.flatnonzero(tokens == meta.eod_id) + 1)[:-1]
    assert len(parts) == meta.num_documents
    return [tokenizer.decode(part[:-1]) for part in parts]


# ------------------------------------------------------------------------------------------------------- tokenizer


@given(text=st.text() | st.text(alphabet="\u2581 \n\t\0a<>", max_size=30))
@settings(max_examples=100)
def test_round_trip_loses_nothing(tokenizer, text):
    tokens = tokenizer.encode(text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.eod_id not in tokens and 0 not in tokens


def test_odd_texts_survive(tokenizer):
    for text in (ODD, TEXT, "", " ", "\n"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_encoding_in_blocks_changes_nothing(tokenizer, monkeypatch):
    text = (TEXT + ODD) * 3
    whole = tokenizer.encode(text)
    monkeypatch.setattr("megatron_ft.data.tokenizer.BLOCK_CHARS", 50)
    assert len(list(tokenizer.encode_blocks(text))) > 50
    assert tokenizer.encode(text) == whole


def test_training_is_deterministic_and_prints_nothing(capfd):
    first, second = train_tokenizer([TEXT], VOCAB), train_tokenizer([TEXT], VOCAB)
    assert first.model == second.model
    assert capfd.readouterr() == ("", "")


def largest(caught):
    return int(str(caught.value).split("at most ")[1].split(":")[0])


def test_any_text_can_be_learned_from():
    """Lines longer than the trainer counts, and characters it refuses."""
    for text in ("x" * 100_000 + " y", "nospace", "a\tb\0c\u2581d\u2585", "\u2585\t\0", "word " * 30_000):
        with pytest.raises(DataError) as caught:
            train_tokenizer([text + "abc"], 4096)
        tokenizer = train_tokenizer([text + "abc"], largest(caught))
        for other in (text, ODD):
            assert tokenizer.decode(tokenizer.encode(other)) == other


def test_a_vocabulary_too_large_names_the_largest():
    with pytest.raises(DataError, match=r"--vocab-size 4096 is too large .* at most (\d+): use --vocab-size") as caught:
        train_tokenizer([TEXT], 4096)
    assert train_tokenizer([TEXT], largest(caught)).vocab_size == largest(caught)


@pytest.mark.parametrize("size", [261, 270])
def test_a_vocabulary_too_small_names_the_smallest(size):
    with pytest.raises(DataError, match=rf"--vocab-size {size} is too small.*use --vocab-size \d+ or larger") as caught:
        train_tokenizer([TEXT], size)
    smallest = int(str(caught.value).split("--vocab-size ")[2].split()[0])
    assert train_tokenizer([TEXT], smallest).vocab_size == smallest


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"documents": 5}, "documents=5: give several of them"),
        ({"documents": [{"text": "a\ud800"}]}, "document 0 of the stream has half of a surrogate pair"),
        ({"text_files": "web.txt"}, "text_files='web.txt': give a list of files"),
        ({"text_files": ["a\0b.txt"]}, "is no path"),
        ({"tokenizer": 5}, "5 is no path"),
        ({"documents": [{"text": "a"}], "vocab_size": "4096"}, "--vocab-size '4096' must be a whole number"),
        ({"documents": [{"text": "a"}], "workers": float("nan")}, "--workers nan must be a whole number"),
    ],
)
def test_arguments_of_another_type_are_told_with_the_remedy(tmp_path, options, words):
    with pytest.raises(DataError, match=words):
        prepare(tmp_path / "data", **options)


def test_impossible_vocabularies_and_texts_are_refused():
    for size in (0, -5, 1, 260, 2**31):
        with pytest.raises(DataError, match=f"--vocab-size {size} must be above 260"):
            train_tokenizer([TEXT], size)
    for texts in ([], ["\t\n\0"]):
        with pytest.raises(DataError, match="no characters to train on"):
            train_tokenizer(texts, VOCAB)


def test_a_tokenizer_that_is_not_there_or_damaged(tmp_path):
    with pytest.raises(DataError, match="there is no tokenizer .*megatron-ft prepare --out"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"not a model")
    with pytest.raises(DataError, match="damaged"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 17\n")
    with pytest.raises(DataError, match=r"tokenizer\.json: is a pointer of Git LFS.*run `git lfs pull`"):
        Tokenizer.load(tmp_path)


# --------------------------------------------------------------------------------------------------------- prepare


def test_txt_jsonl_and_parquet_are_read_in_order(tmp_path):
    (tmp_path / "a[1]*.txt").write_text(TEXT, encoding="utf-8")  # not a pattern
    lines = [{"text": ODD, "id": 1}, {"text": None, "id": 2}, {"text": " \n"}, {"text": "second\nline", "id": "x"}]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    table = pyarrow.table({"k": [1, 2], "text": pyarrow.array(["from parquet", ""], pyarrow.large_string())})
    pyarrow.parquet.write_table(table, tmp_path / "c.PARQUET")
    files = [tmp_path / "c.PARQUET", tmp_path / "b.jsonl", tmp_path / "a[1]*.txt"]
    meta = prepare(tmp_path / "out", files, VOCAB, log=quiet)
    assert documents_in(tmp_path / "out") == ["from parquet", ODD, "second\nline", TEXT]
    assert meta.source == "c.PARQUET, b.jsonl, a[1]*.txt" and meta.vocab_size == VOCAB and meta.dtype == "uint16"


def test_blank_documents_are_left_out_wherever_they_are(tmp_path):
    file = tmp_path / "many.jsonl"
    texts = [""] * 100 + [TEXT] + [" "] * 100 + ["end"]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(tmp_path / "out", [file], VOCAB, log=quiet)
    assert documents_in(tmp_path / "out") == [TEXT, "end"]


def test_equal_requests_give_equal_bytes_and_nothing_else_is_left(tmp_path, text_file, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    metas = [prepare(tmp_path / name, [text_file], VOCAB, log=quiet) for name in ("one", "two")]
    assert metas[0] == metas[1] == read_meta(tmp_path / "one")
    for name in ("one", "two"):
        files = {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()}
        assert set(files) == {"tokens.bin", "tokens.idx", "tokenizer.model", "meta.json", ".lock"}
        assert hashlib.sha256(files["tokens.bin"]).hexdigest() == metas[0].tokens_sha256
        assert hashlib.sha256(files["tokenizer.model"]).hexdigest() == metas[0].tokenizer_sha256
    assert not (tmp_path / "home").exists()


def test_nothing_is_printed_but_what_is_logged(tmp_path, text_file, capfd):
    lines = []
    prepare(tmp_path / "out", [text_file], VOCAB, log=lines.append)
    assert len(lines) == 1 and lines[0].startswith(f"prepared {tmp_path / 'out'}: 1 documents, ")
    assert capfd.readouterr() == ("", "")


def test_an_identical_request_returns_at_once_and_another_rebuilds(tmp_path, text_file):
    out, lines = tmp_path / "out", []
    first = prepare(out, [text_file], VOCAB, log=lines.append)
    written = (out / "tokens.bin").stat().st_mtime_ns
    assert prepare(out, [text_file], VOCAB, log=lines.append) == first
    assert lines[1].startswith("already prepared: ") and (out / "tokens.bin").stat().st_mtime_ns == written
    assert prepare(out, [text_file], VOCAB + 1, log=lines.append).vocab_size == VOCAB + 1
    text_file.write_text(TEXT + " More.", encoding="utf-8")
    assert prepare(out, [text_file], VOCAB + 1, log=lines.append).tokens_sha256 != first.tokens_sha256
    assert documents_in(out) == [TEXT + " More."]
    (out / "tokens.bin").write_bytes(b"")  # damaged: asking again repairs it
    prepare(out, [text_file], VOCAB + 1, log=lines.append)
    assert documents_in(out) == [TEXT + " More."]


def test_other_files_in_the_directory_are_left_alone(tmp_path, text_file):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("mine")
    prepare(tmp_path / "out", [text_file], VOCAB, log=quiet)
    assert (tmp_path / "out" / "thesis.tex").read_text() == "mine"


class Killed(BaseException):
    """An exception that stands for a kill: no handler of the package may catch it."""


@pytest.mark.parametrize("moment", ["_train", "tokenize", "_write_tokens", "index", "_publish"])
def test_an_interrupted_prepare_leaves_the_old_data_or_none(tmp_path, text_file, monkeypatch, moment):
    def die(*args):
        raise Killed

    new, old = tmp_path / "new", tmp_path / "old"
    before = prepare(old, [text_file], VOCAB, log=quiet)
    with monkeypatch.context() as patched:
        patched.setattr(dataset, moment, die)
        for out in (new, old):
            with pytest.raises(Killed):
                prepare(out, [text_file], VOCAB + 1, log=quiet)
    with pytest.raises(DataError, match="not a complete dataset.*megatron-ft prepare --out"):
        PackedDataset(new, **SHAPE)
    assert read_meta(old) == before and documents_in(old) == [TEXT]
    assert not list(old.glob(".preparing-*"))


@pytest.mark.parametrize("moved", [0, 1, 2, 3])
def test_killed_while_moving_into_place_it_does_not_open(tmp_path, text_file, monkeypatch, moved):
    out, real, calls = tmp_path / "out", dataset.os.replace, []
    prepare(out, [text_file], VOCAB, log=quiet)

    def replace(source, target):
        if target.parent == out:
            if len(calls) == moved:
                raise Killed
            calls.append(target)
        real(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(dataset.os, "replace", replace)
        patched.setattr(dataset.shutil, "rmtree", lambda *args, **kwargs: None)  # killed: no clean-up either
        with pytest.raises(Killed):
            prepare(out, [text_file], VOCAB + 1, log=quiet)
    with pytest.raises(DataError, match="not a complete dataset"):
        read_meta(out)
    assert list(out.glob(".preparing-*"))
    prepare(out, [text_file], VOCAB + 1, log=quiet)
    assert documents_in(out) == [TEXT] and not list(out.glob(".preparing-*"))


def test_a_second_prepare_waits_for_the_first(tmp_path, text_file):
    out, lines = tmp_path / "out", []
    waiting = threading.Event()

    def log(line):
        lines.append(line)
        waiting.set()

    prepare(out, [text_file], VOCAB, log=quiet)
    meta = (out / "meta.json").read_bytes()
    (out / "meta.json").unlink()
    with open(out / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        second = threading.Thread(target=prepare, args=(out, [text_file], VOCAB, log))
        second.start()
        assert waiting.wait(60)
        (out / "meta.json").write_bytes(meta)
    second.join()
    assert f"being prepared by pid {os.getpid()} of user" in lines[0] and lines[1].startswith("already prepared")


# ---------------------------------------------------------------------------------------------- errors of prepare


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, r"gone\.txt: cannot be read \(No such file"),
        ("text.pdf", b"x", r"text\.pdf: cannot read files ending in '\.pdf': convert it to \.txt"),
        ("noending", b"x", r"noending: cannot read files ending in ''"),
        ("empty.txt", b"", r"empty\.txt: the file is empty: leave it out"),
        ("blank.txt", b" \n\n ", r"blank\.txt: holds only blanks"),
        ("blank.jsonl", b'{"text": ""}\n{"text": null}\n', r"blank\.jsonl: holds only blanks|not strings"),
        ("latin.txt", "naïve".encode("latin-1"), r"latin\.txt: it cannot be read as \.txt \('utf-8' codec .* UTF-8"),
        ("latin.jsonl", b'{"text": "na\xefve"}\n', r"latin\.jsonl: line 1 cannot be read as \.jsonl .* UTF-8"),
        (
            "broken.jsonl",
            b'{"text": "x"}\nno json',
            r"broken\.jsonl: line 2 cannot be read as \.jsonl \(Expecting .* column 1",
        ),
        ("broken.parquet", b"PAR1", r"broken\.parquet: it cannot be read as \.parquet"),
        ("body.jsonl", b'{"body": "x"}\n', r"body\.jsonl: has no field \"text\", only \['body'\]: rename"),
        (
            "number.jsonl",
            b'{"text": 3}\n',
            r"number\.jsonl: line 1 .*\"text\" is a float, not a string.*one JSON object",
        ),
        ("list.jsonl", b'{"text": ["a"]}\n', r"list\.jsonl: line 1 .*\"text\" is a list"),
    ],
)
def test_each_bad_file_is_named_with_rule_and_remedy(tmp_path, text_file, capfd, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        prepare(tmp_path / "out", [text_file, tmp_path / name], VOCAB, log=quiet)
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_an_empty_list_of_files_is_not_the_default_corpus(tmp_path):
    with pytest.raises(DataError, match="no text files given"):
        prepare(tmp_path / "out", [], log=quiet)


def test_a_txt_file_longer_than_a_document_can_be(tmp_path, text_file, monkeypatch):
    monkeypatch.setattr(text_files, "MAX_TXT_BYTES", 10)
    with pytest.raises(DataError, match=r"more are more than one document can hold .* \.jsonl"):
        prepare(tmp_path / "out", [text_file], VOCAB, log=quiet)


def test_bad_outputs_are_named(tmp_path, text_file, monkeypatch):
    with pytest.raises(DataError, match=r"text\.txt is a file: name a directory"):
        prepare(text_file, [text_file], VOCAB, log=quiet)
    with pytest.raises(DataError, match=r"cannot prepare .*Not a directory.*choose another --out"):
        prepare(text_file / "below", [text_file], VOCAB, log=quiet)

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(dataset.durable_file, "write", full)
    with pytest.raises(DataError, match="No space left on device: free space there or choose another --out"):
        prepare(tmp_path / "out", [text_file], VOCAB, log=quiet)
    with pytest.raises(DataError, match="not a complete dataset"):
        read_meta(tmp_path / "out")


def test_a_full_disk_while_reading_is_not_blamed_on_the_file(tmp_path, text_file, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pyarrow, "OSFile", full)
    with pytest.raises(DataError, match="cannot prepare .*No space left on device"):
        prepare(tmp_path / "out", [text_file], VOCAB, log=quiet)


# -------------------------------------------------------------------------------------------------- default corpus


def test_without_text_the_addresses_of_the_package_are_prepared(tmp_path):
    meta = prepare(tmp_path, log=quiet)
    assert (meta.source, meta.vocab_size) == ("12 State of the Union addresses", 4096)
    texts = documents_in(tmp_path)
    assert len(texts) == 12 and all(text.startswith("Fellow-Citizens of the Senate") for text in texts)


def test_data_of_an_earlier_version_open(tmp_path, text_file):
    meta = prepare(tmp_path, [text_file], VOCAB, log=quiet)
    content = json.loads((tmp_path / dataset.META).read_text())
    (tmp_path / dataset.META).write_text(json.dumps({**content, "fallback": False}))
    assert read_meta(tmp_path) == meta


# --------------------------------------------------------------------------------------------------------- opening


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    directory = tmp_path_factory.mktemp("prepared")
    (directory / "text.txt").write_text(TEXT, encoding="utf-8")
    prepare(directory / "out", [directory / "text.txt"], VOCAB, log=quiet)
    return directory / "out"


def test_a_microbatch_is_two_tensors_one_token_apart(prepared):
    data = PackedDataset(prepared, **SHAPE)
    tokens = np.fromfile(prepared / "tokens.bin", dtype="<u2").astype(np.int64)
    assert data.num_samples == (len(tokens) - 1) // 16 and data.vocab_size == VOCAB
    for microbatch in (Microbatch(0, 0, 0), Microbatch(5, 1, 2), Microbatch(1000, 0, 1)):
        batch = data(microbatch)
        assert set(batch) == {"input_ids", "labels"}
        for row, sample in enumerate(data.indices(microbatch).tolist()):
            assert batch["input_ids"][row].tolist() == tokens[sample * 16 : sample * 16 + 16].tolist()
            assert batch["labels"][row].tolist() == tokens[sample * 16 + 1 : sample * 16 + 17].tolist()
        for tensor in batch.values():
            assert tensor.shape == (2, 16) and str(tensor.dtype) == "torch.int64" and tensor.is_contiguous()
        assert all(batch[key].equal(data.get(microbatch)[key]) for key in batch)


def test_the_last_sample_ends_inside_the_text(prepared):
    num_tokens = read_meta(prepared).num_tokens
    for seq_len in (1, 7, num_tokens - 2, num_tokens - 1):
        data = PackedDataset(prepared, **{**SHAPE, "seq_len": seq_len})
        assert data.sample(data.num_samples - 1).shape == (seq_len + 1,)
        with pytest.raises(ValueError, match="outside range"):
            data.sample(data.num_samples)


def test_a_large_vocabulary_takes_four_bytes(tmp_path):
    assert [dataset.token_dtype(size).name for size in (300, 65535, 65536)] == ["uint16", "uint16", "uint32"]
    np.array([5, 70_000, 1], dtype="<u4").tofile(tmp_path / "tokens.bin")
    (tmp_path / "tokenizer.model").write_bytes(b"")
    probed = indexed.probed(tmp_path / "tokens.bin")
    files = ("", probed, "", {}, "<eod>", "tokenizer.model")
    meta = dataset.DatasetMeta(2, "uint32", 3, 1, 70_001, 1, "by hand", *files)
    (tmp_path / "meta.json").write_text(json.dumps(dataset.asdict(meta)))
    data = PackedDataset(tmp_path, **{**SHAPE, "seq_len": 2})
    assert data.sample(0).tolist() == [5, 70_000, 1]


def damage_meta(directory, **changes):
    file = directory / "meta.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: (d / "meta.json").unlink(), "not a complete dataset, meta.json is missing"),
        (lambda d: (d / "meta.json").write_text("{"), "meta.json is damaged"),
        (lambda d: (d / "meta.json").write_text("[]"), "format version None, this program reads 2"),
        (lambda d: damage_meta(d, format_version=1), "format version 1, this program reads 2"),
        (lambda d: damage_meta(d, extra=2), "damaged .*extra"),
        (lambda d: damage_meta(d, dtype="nonsense"), "damaged .*nonsense"),
        (lambda d: (d / "tokens.bin").write_bytes(b"123"), r"damaged \(tokens.bin has 3 bytes, meta.json says \d+"),
        (lambda d: damage_meta(d, dtype="int16"), r"damaged \(meta.json has 310 token ids in int16"),
        (lambda d: damage_meta(d, eod_id=310), r"damaged \(.*the one that ends a document is 310"),
        (
            lambda d: (d / "tokens.bin").write_bytes((d / "tokens.bin").read_bytes()[2:] + b"\2\0"),
            r"damaged \(tokens.bin has other tokens than those of meta.json",
        ),
        (lambda d: (d / "tokens.bin").unlink(), r"damaged \(tokens.bin has 0 bytes"),
        (lambda d: (d / "tokenizer.model").unlink(), "damaged .*tokenizer.model is missing"),
    ],
)
def test_incomplete_or_damaged_data_do_not_open(tmp_path, prepared, damage, message):
    out = tmp_path / "copy"
    out.mkdir()
    for name in ("tokens.bin", "tokenizer.model", "meta.json"):
        (out / name).write_bytes((prepared / name).read_bytes())
    PackedDataset(out, **SHAPE)
    damage(out)
    with pytest.raises(DataError, match=message) as caught:
        PackedDataset(out, **SHAPE)
    assert f"megatron-ft prepare --out {out}" in str(caught.value)


def test_a_token_that_changed_after_the_opening_is_noticed(tmp_path, prepared):
    out = tmp_path / "copy"
    shutil.copytree(prepared, out)
    data = PackedDataset(out, **SHAPE)
    with open(out / "tokens.bin", "r+b") as file:
        file.write(b"\xff" * read_meta(prepared).num_tokens * 2)
    with pytest.raises(DataError, match=r"tokens\.bin: has token id 65535, ids must be in range\(310\)"):
        data(Microbatch(0, 0, 0))


@pytest.mark.parametrize("linked", [False, True])
def test_the_tokenizer_of_other_tokens_is_refused(tmp_path, prepared, linked):
    out = tmp_path / "copy"
    shutil.copytree(prepared, out)
    if linked:  # as git-annex and DVC keep data
        (out / "meta.json").unlink()
        (out / "meta.json").symlink_to(prepared / "meta.json")
    (out / "tokenizer.model").write_bytes(train_tokenizer([TEXT], VOCAB - 1).model)
    with pytest.raises(DataError, match=r"tokenizer\.model: is not the tokenizer that made the tokens beside it"):
        Tokenizer.load(out)


def test_without_locks_the_work_of_another_process_is_left_alone(tmp_path, text_file, monkeypatch):
    monkeypatch.setattr(dataset.shared_file, "lock", lambda fd, wait=False: None)
    (tmp_path / "out" / ".preparing-other").mkdir(parents=True)
    prepare(tmp_path / "out", [text_file], VOCAB, log=quiet)
    assert documents_in(tmp_path / "out") == [TEXT] and (tmp_path / "out" / ".preparing-other").exists()


def test_a_missing_directory_gets_the_command_that_prepares_one(tmp_path):
    with pytest.raises(DataError, match=r"gone: there is no prepared dataset: run `megatron-ft prepare --out .*gone`"):
        PackedDataset(tmp_path / "gone", **SHAPE)


def test_a_sequence_longer_than_the_text_names_the_longest(prepared):
    largest = read_meta(prepared).num_tokens - 1
    with pytest.raises(DataError, match=rf"sequence length {largest + 1} is more .* use {largest} or less"):
        PackedDataset(prepared, **{**SHAPE, "seq_len": largest + 1})


@pytest.mark.parametrize("name", ["seq_len", "samples_per_microbatch", "groups", "microbatches_per_group"])
def test_numbers_below_one_are_misuse(prepared, name):
    with pytest.raises(ValueError, match=f"{name}=0"):
        PackedDataset(prepared, **{**SHAPE, name: 0})
