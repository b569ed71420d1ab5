"""Tokenizers of the user's: which token ends a document is clear, text never has it, and the prepared directory keeps it."""

from __future__ import annotations

import io
import json
import re

import numpy as np
import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from megatron_ft.data import IndexedTokens, PackedDataset, Tokenizer, prepare, read_meta, tokenizer_pool
from megatron_ft.errors import DataError

TEXT = "\n".join(f"The {number}. day was as long as the day before it, and nobody counted." for number in range(40))
ODD = f"{TEXT}\n  two  spaces <|endoftext|> </s> Ä 漢 🎉"


def json_file(path, special=("<|endoftext|>",)):
    """A byte-level tokenizer as GPT-2's, which cuts and pads texts unless told otherwise."""
    made = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    how = {"special_tokens": list(special), "initial_alphabet": alphabet, "show_progress": False}
    made.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=320, **how))
    made.enable_truncation(5)
    made.enable_padding(length=8)
    made.save(str(path))
    return path


def model_file(path, **options):
    """A sentencepiece model with that library's own settings."""
    model, how = (
        io.BytesIO(),
        {"vocab_size": 320, "byte_fallback": True, "model_type": "bpe", "minloglevel": 2, **options},
    )
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(TEXT.split("\n")), model_writer=model, **how)
    path.write_bytes(model.getvalue())
    return path


def prepared(tmp_path, tokenizer, log=lambda line: None, **options):
    file = tmp_path / "text.jsonl"
    if not file.exists():
        lines = [{"text": ODD}, {"text": TEXT}]
        file.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return prepare(tmp_path / "out", [file], tokenizer=tokenizer, log=log, **options)


@pytest.mark.parametrize(("make", "name"), [(json_file, "tokenizer.json"), (model_file, "tokenizer.model")])
def test_a_prepared_directory_keeps_the_tokenizer_and_its_end_of_document(tmp_path, make, name):
    file = make(tmp_path / f"mine{name[9:]}")
    meta = prepared(tmp_path, file)
    assert (meta.eod_token, meta.tokenizer_file) == ("<|endoftext|>" if name.endswith("json") else "</s>", name)
    assert (tmp_path / "out" / name).read_bytes() == file.read_bytes()
    tokens = np.fromfile(tmp_path / "out" / "tokens.bin", dtype=meta.dtype)
    parts = np.split(tokens, np.flatnonzero(tokens == meta.eod_id) + 1)[:-1]
    tokenizer = Tokenizer.load(tmp_path / "out")
    assert [tokenizer.decode(part[:-1]) for part in parts] == [
        tokenizer.decode(tokenizer.encode(t)) for t in (ODD, TEXT)
    ]
    if name.endswith("json"):
        assert tokenizer.decode(parts[0][:-1]) == ODD
    assert PackedDataset(tmp_path / "out", 16, 1, 1, 1, 0).vocab_size == tokenizer.vocab_size == meta.vocab_size


def words_file(path, **options):
    """A tokenizer of the words of TEXT, whose model knows no bytes."""
    made = tokenizers.Tokenizer(models.BPE(**options))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    how = {"special_tokens": ["</s>", *options.values()], "show_progress": False}
    made.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=320, **how))
    made.save(str(path))
    return path


@pytest.mark.parametrize(
    ("make", "lost"),
    [
        (lambda path: words_file(path / "t.json"), 12),  # < | x | > p < / > Ä 漢 🎉
        (lambda path: words_file(path / "t.json", unk_token="<unk>"), 12),
        (lambda path: model_file(path / "t.model", byte_fallback=False, vocab_size=60), 9),
        (lambda path: json_file(path / "t.json"), 0),
        (lambda path: model_file(path / "t.model"), 0),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_text_without_a_token_is_told_once_with_its_number(tmp_path, monkeypatch, make, lost, workers):
    monkeypatch.setattr(tokenizer_pool, "DOCUMENTS_PER_SPAN", 1)
    lines: list[str] = []
    prepared(tmp_path, make(tmp_path), workers=workers, log=lines.append)
    told = [line for line in lines if "no token for" in line]
    assert [int(re.search(r"no token for (\d+) ", line)[1]) for line in told] == [lost] * bool(lost)


def test_a_text_that_cannot_be_encoded_is_an_error_in_a_worker_too(tmp_path, monkeypatch):
    monkeypatch.setattr(tokenizer_pool, "DOCUMENTS_PER_SPAN", 1)
    known = "<|endoftext|>"
    made = tokenizers.Tokenizer(
        models.WordLevel({letter: number for number, letter in enumerate(dict.fromkeys(known))})
    )
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made.add_special_tokens([known])
    made.save(str(tmp_path / "t.json"))
    with pytest.raises(
        DataError, match=r"t\.json: the tokenizer cannot encode a text.*give it a token for unknown text"
    ):
        prepared(tmp_path, tmp_path / "t.json", workers=2)


@pytest.mark.parametrize("make", [lambda path: json_file(path / "t.json"), lambda path: model_file(path / "t.model")])
def test_a_long_text_that_is_divided_has_the_same_tokens(tmp_path, monkeypatch, make):
    tokenizer = Tokenizer.load(make(tmp_path))
    text = f"{ODD}\n\n  {ODD}\n"
    whole = tokenizer.encode(text)
    monkeypatch.setattr("megatron_ft.data.tokenizer.BLOCK_CHARS", 100)
    blocks = list(tokenizer.encode_blocks(text))
    assert [token for block in blocks for token in block] == whole
    assert len(blocks) > 20


def test_another_tokenizer_prepares_anew_and_leaves_one_file(tmp_path):
    prepared(tmp_path, model_file(tmp_path / "one.model"))
    again = prepared(tmp_path, json_file(tmp_path / "two.json"))
    assert read_meta(tmp_path / "out") == again and not (tmp_path / "out" / "tokenizer.model").exists()
    written = (tmp_path / "out" / "tokens.bin").stat().st_mtime_ns
    assert prepared(tmp_path, tmp_path / "two.json", eod_token="<|endoftext|>") == again
    assert (tmp_path / "out" / "tokens.bin").stat().st_mtime_ns == written


def test_the_tokenizer_of_another_prepared_directory(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    first = prepare(tmp_path / "first", [tmp_path / "text.txt"], 310, log=lambda line: None)
    second = prepared(tmp_path, tmp_path / "first")
    assert second.tokenizer_sha256 == first.tokenizer_sha256 and second.eod_id == first.eod_id
    assert Tokenizer.load(tmp_path / "out").decode(Tokenizer.load(tmp_path / "first").encode(ODD)) == ODD


def test_a_large_vocabulary_is_stored_in_four_bytes_that_megatron_reads(tmp_path):
    file = tmp_path / "large.json"
    made = tokenizers.Tokenizer(models.WordLevel({f"<{number}>": number for number in range(70_000)}, unk_token="<0>"))
    made.add_special_tokens(["<eod>"])
    made.save(str(file))
    meta = prepared(tmp_path, file)
    assert (meta.dtype, meta.vocab_size, meta.eod_id) == ("uint32", 70_001, 70_000)
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    theirs = indexed.IndexedDataset(str(tmp_path / "out" / "tokens"))
    assert [document[-1] for document in theirs] == [70_000] * 2
    assert np.concatenate(list(theirs)).tolist() == np.fromfile(tmp_path / "out" / "tokens.bin", "<u4").tolist()


def test_megatron_reads_a_prepared_directory(tmp_path):
    meta = prepared(tmp_path, json_file(tmp_path / "mine.json"))
    ours = IndexedTokens(tmp_path / "out" / "tokens", 16)
    assert (ours.num_tokens, ours.num_documents) == (meta.num_tokens, meta.num_documents)
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core is not installed")
    theirs = indexed.IndexedDataset(str(tmp_path / "out" / "tokens"))
    tokenizer = Tokenizer.load(tmp_path / "out")
    assert [tokenizer.decode(document[:-1]) for document in theirs] == [ODD, TEXT]
    assert list(theirs.document_indices) == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (lambda path: json_file(path / "t.json", ["<eos>"]), {}, r"not clear.*none of.*--eod-token; it has <eos>"),
        (lambda path: json_file(path / "t.json", ["</s>", "<eod>"]), {}, r"not clear.*have </s> and <eod>: name"),
        (lambda path: json_file(path / "t.json"), {"eod_token": "<eos>"}, r"--eod-token '<eos>' is not in.*<\|endof"),
        (lambda path: json_file(path / "t.json"), {"eod_token": "a"}, r"a text that contains 'a' would end a document"),
        (lambda path: model_file(path / "t.model", eos_id=-1), {}, r"t\.model: which token.*none of.*it has <s>"),
        (lambda path: path / "gone", {}, r"gone: there is no tokenizer \(No such file"),
        (lambda path: path, {}, r"tokenizer\.model: there is no tokenizer \(No such file"),
        (lambda path: model_file(path / "t.json"), {}, r"t\.json: the tokenizer cannot be read"),
        (lambda path: json_file(path / "t.model"), {}, r"t\.model: the tokenizer model is damaged, or is none of"),
        (lambda path: json_file(path / "t.json"), {"vocab_size": 400}, r"--vocab-size 400 is for a tokenizer that is"),
        (lambda path: None, {"eod_token": "x"}, r"--eod-token x is for a --tokenizer of yours"),
        (lambda path: json_file(path / "t.json"), {"workers": 0}, r"--workers 0 must be a whole number >= 1"),
    ],
)
def test_each_mistake_is_named_with_rule_and_remedy(tmp_path, make, options, message):
    with pytest.raises(DataError, match=message) as caught:
        prepared(tmp_path, make(tmp_path), **options)
    assert "\n" not in str(caught.value) and not (tmp_path / "out").exists()
