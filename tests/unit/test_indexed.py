"""Megatron's indexed corpora: what megatron-core writes is read, and it reads what is written here."""

from __future__ import annotations

import os
import struct
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ft.data.indexed import Blend, IndexedTokens, open_corpora, write
from megatron_ft.data.loader import Loader
from megatron_ft.errors import DataError
from megatron_ft.types import Microbatch


def view(prefix, lengths, first_bytes, documents=None, *, code=4, more=b""):
    """Write an index with any content."""
    documents = range(len(lengths) + 1) if documents is None else documents
    header = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(documents))
    parts = zip(("<i4", "<i8", "<i8"), (lengths, first_bytes, documents), strict=True)
    prefix.with_suffix(".idx").write_bytes(header + b"".join(np.array(v, k).tobytes() for k, v in parts) + more)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 17\n"
DOCUMENTS = [np.arange(1, 8), np.arange(20, 23), np.arange(40, 52)]


def test_megatron_reads_what_is_written_here(tmp_path):
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    write(tmp_path / "corpus", DOCUMENTS)
    theirs = indexed.IndexedDataset(str(tmp_path / "corpus"))
    assert [list(theirs[number]) for number in range(len(theirs))] == [list(one) for one in DOCUMENTS]
    assert list(theirs.document_indices) == [0, 1, 2, 3]


def test_what_megatron_writes_is_read(tmp_path):
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    torch = pytest.importorskip("torch")
    builder = indexed.IndexedDatasetBuilder(str(tmp_path / "corpus.bin"), dtype=np.uint16)
    for document in DOCUMENTS:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "corpus.idx"))
    dataset = IndexedTokens(tmp_path / "corpus", 5)
    stream = np.concatenate(DOCUMENTS)
    assert len(dataset) == (len(stream) - 1) // 5
    for number in range(len(dataset)):
        sample = dataset[number]
        assert sample["input_ids"].tolist() == list(stream[5 * number : 5 * number + 5])
        assert sample["labels"].tolist() == list(stream[5 * number + 1 : 5 * number + 6])


def test_a_dataset_of_megatrons_own_gives_its_samples_in_its_order(tmp_path):
    gpt = pytest.importorskip("megatron.core.datasets.gpt_dataset", reason="megatron-core is not installed")
    builder = pytest.importorskip("megatron.core.datasets.blended_megatron_dataset_builder")
    for name in "ab":
        write(tmp_path / name, DOCUMENTS * 9)
    tokenizer = SimpleNamespace(eod=1, pad=0, vocab_size=64, unique_identifiers={})
    blend = ([str(tmp_path / "a"), str(tmp_path / "b")], [0.7, 0.3])
    how = {"split": "100,0,0", "path_to_cache": None, "tokenizer": tokenizer, "blend": blend}
    marks = {"reset_position_ids": True, "reset_attention_mask": True, "eod_mask_loss": True}
    config = gpt.GPTDatasetConfig(random_seed=1, sequence_length=8, **how, **marks)
    made = builder.BlendedMegatronDatasetBuilder(gpt.GPTDataset, [40, 0, 0], lambda: True, config)
    train = made.build()[0]
    shape = {"groups": 2, "microbatches_per_group": 2, "samples_per_microbatch": 3, "seed": 7}
    loader, microbatch = Loader(train, **shape, shuffle=False), Microbatch(1, 1, 0)
    numbers = loader.indices(microbatch)
    assert numbers == [18, 19, 20]
    for name, values in loader(microbatch).items():
        assert values.tolist() == [train[number][name].tolist() for number in numbers]
    assert loader.fingerprint["dataset"] == train.unique_description_hash


def test_tokens_that_do_not_fit_are_refused(tmp_path):
    with pytest.raises(DataError, match="document 1 has tokens 70000 to 70000, uint16 holds 0 to 65535"):
        write(tmp_path / "corpus", [np.arange(3), np.array([70_000])], np.uint16)
    with pytest.raises(DataError, match="document 0 has tokens -1 to 2"):
        write(tmp_path / "corpus", [np.array([2, -1])])
    for document in (np.array([1.5]), np.zeros((2, 3), int)):
        with pytest.raises(DataError, match="document 0 is .* give whole numbers"):
            write(tmp_path / "corpus", [document])
    assert not (tmp_path / "corpus.bin").exists()


def test_ranks_compare_the_tokens_and_what_makes_samples_of_them(tmp_path):
    """Of 60 tokens, samples of 30 and of 40 are as many: their number tells nothing."""
    for name, first in (("one", 0), ("copy", 0), ("other", 1)):
        write(tmp_path / name, [np.arange(first, first + 60)])
    made = [IndexedTokens(tmp_path / name, 30).fingerprint for name in ("one", "copy", "other")]
    made += [
        IndexedTokens(tmp_path / "one", 40).fingerprint,
        IndexedTokens(tmp_path / "one", 30, documents=True).fingerprint,
    ]
    assert made[0] == made[1] and len(set(made)) == 4
    assert "samples of 40 tokens" in made[3] and "documents" in made[4]


@pytest.mark.parametrize("weights", [[float("nan"), 1.0], [float("inf"), 1.0], ["1", "2"]])
def test_weights_that_are_no_proportions_are_refused(weights):
    with pytest.raises(DataError, match="one above 0 for each"):
        Blend([range(3), range(3)], weights)


def test_a_sample_says_where_documents_begin(tmp_path):
    write(tmp_path / "corpus", DOCUMENTS, np.uint16)
    dataset = IndexedTokens(tmp_path / "corpus", 10, documents=True)
    assert dataset[0]["document_ids"].tolist() == [0] * 7 + [1] * 3
    assert dataset[0]["position_ids"].tolist() == [*range(7), *range(3)]
    assert dataset[1]["document_ids"].tolist() == [0] * 10
    assert dataset[1]["position_ids"].tolist() == list(range(10))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: path.with_suffix(".idx").unlink(), "corpus.idx cannot be read"),
        (lambda path: path.with_suffix(".idx").write_bytes(b"MMIDIDX"), "too short"),
        (lambda path: path.with_suffix(".idx").write_bytes(b"x" * 100), "begins with b'xxxxxxxxx'"),
        (lambda path: path.with_suffix(".bin").write_bytes(b"12"), "has 2 bytes"),
        (
            lambda path: path.with_suffix(".idx").write_bytes(path.with_suffix(".idx").read_bytes()[:-9]),
            "too short for 3",
        ),
        (lambda path: path.write_bytes(path.read_bytes() + b"1234"), "has 92 bytes, corpus.idx says 88"),
        (
            lambda path: view(path.with_suffix(""), [7, 3, 12], [0, 28, 41]),
            "sequence 2 has 12 tokens .* from byte 41 on",
        ),
        (
            lambda path: view(path.with_suffix(""), [7, 3, 13], [28, 0, 40]),
            "sequence 2 has 13 tokens .* from byte 40 on",
        ),
        (
            lambda path: view(path.with_suffix(""), [7, 3, 12], [28, -4, 40]),
            "sequence 1 has 3 tokens .* from byte -4 on",
        ),
        (lambda path: view(path.with_suffix(""), [7, -3, 12], [0, 28, 40]), "negative length"),
        (lambda path: view(path.with_suffix(""), [22], [0], [0]), "from sequence 0 to the end of its 1 sequences"),
        (lambda path: view(path.with_suffix(""), [22], [0], [1, 1]), "from sequence 0 to the end"),
        (lambda path: view(path.with_suffix(""), [22], [0], [0, 2, 1]), "from sequence 0 to the end"),
        (lambda path: view(path.with_suffix(""), [22], [0], more=b"\1"), "it is multimodal, and 1 bytes follow"),
        (lambda path: view(path.with_suffix(""), [22], [0], more=b"\0\0"), "it has 2 bytes follow"),
        (lambda path: view(path.with_suffix(""), [22], [0], code=7), "type of tokens is number 7"),
        (lambda path: path.write_text(POINTER), "corpus.bin: is a pointer of Git LFS.*git lfs pull"),
        (lambda path: path.with_suffix(".idx").write_text(POINTER), "corpus.idx: is a pointer of Git LFS"),
        (lambda path: (path.with_suffix(".idx").unlink(), os.mkfifo(path.with_suffix(".idx"))), "it is no file"),
    ],
)
def test_damaged_files_are_told(tmp_path, damage, words):
    write(tmp_path / "corpus", DOCUMENTS)
    damage(tmp_path / "corpus.bin")
    with pytest.raises(DataError, match=words):
        IndexedTokens(tmp_path / "corpus", 5)


@given(data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_an_index_that_is_a_view_of_the_tokens_gives_its_own_sequences(tmp_path, data):
    """Sequences in another order, left out and repeated, as Megatron's reader gives them."""
    lengths = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=8).filter(lambda all: sum(all) > 0))
    ends = np.cumsum(lengths)
    stream = np.arange(100, 100 + ends[-1])
    sequences = [stream[end - length : end] for length, end in zip(lengths, ends, strict=True)]
    chosen = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=1, max_size=12))
    bounds = [0, *sorted(data.draw(st.lists(st.integers(0, len(chosen)), max_size=4))), len(chosen)]
    stream.astype("<i4").tofile(tmp_path / "corpus.bin")
    starts = [(int(ends[n]) - lengths[n]) * 4 for n in chosen]
    view(tmp_path / "corpus", [lengths[n] for n in chosen], starts, bounds)
    parts = [sequences[n] for n in chosen]
    wanted = np.concatenate(parts)
    documents = np.concatenate([[n] * sum(map(len, parts[a:b])) for n, (a, b) in enumerate(pairwise(bounds))])
    try:
        found = IndexedTokens(tmp_path / "corpus", 2, documents=True)
    except DataError as error:  # too few tokens, or what looks like the index of a shorter .bin
        assert len(wanted) <= 2 or ("says" in str(error) and list(wanted) == list(stream[: len(wanted)]))
        return
    assert found.num_tokens == len(wanted) and len(found) == (len(wanted) - 1) // 2
    for number in range(len(found)):
        here, sample = slice(2 * number, 2 * number + 3), found[number]
        same = documents[here][:-1] == documents[here][1:]
        assert sample["input_ids"].tolist() == wanted[here][:-1].tolist()
        assert sample["labels"].tolist() == np.where(same, wanted[here][1:], -100).tolist()
        assert sample["position_ids"].tolist() == [0, int(same[0])]
        assert (sample["document_ids"][0] == sample["document_ids"][1]) == same[0]


def test_megatrons_reader_has_the_same_sequences_of_a_view(tmp_path):
    indexed = pytest.importorskip("megatron.core.datasets.indexed_dataset")
    write(tmp_path / "corpus", DOCUMENTS)
    view(tmp_path / "corpus", [12, 7], [40, 0])
    theirs, ours = indexed.IndexedDataset(str(tmp_path / "corpus")), IndexedTokens(tmp_path / "corpus", 18)
    assert ours[0]["input_ids"].tolist() == [token for number in range(2) for token in theirs[number].tolist()][:-1]


@pytest.mark.parametrize(("wrong", "size"), [(-1, None), (64, 64)])
def test_a_token_that_the_model_does_not_have_is_told(tmp_path, wrong, size):
    """-100 as a label would be left out, and Megatron's parallel embedding gives zeros for what no rank has."""
    write(tmp_path / "corpus", [np.arange(60)])
    np.concatenate([np.arange(59), [wrong]]).astype("<i4").tofile(tmp_path / "corpus.bin")
    dataset = open_corpora([str(tmp_path / "corpus")], 20, vocab_size=size)
    assert dataset[0]["input_ids"].tolist() == list(range(20))
    with pytest.raises(
        DataError, match=rf"corpus.bin, sample 0: has token id {wrong}, ids must be .*use the vocabulary"
    ):
        open_corpora([str(tmp_path / "corpus")], 59, vocab_size=size)[0]


def megatron_blend(weights, size):
    """Megatron's rule, plainly: the next sample is of the dataset that lags furthest behind its weight."""
    taken, order = [0] * len(weights), []
    for number in range(size):
        lags = [weight * max(number, 1) - have for weight, have in zip(weights, taken, strict=True)]
        order.append(lags.index(max(lags)))
        taken[order[-1]] += 1
    return order


WEIGHTS = st.lists(st.floats(1e-3, 10) | st.integers(1, 9), min_size=1, max_size=9)


@given(weights=WEIGHTS, size=st.integers(1, 400))
def test_a_blend_has_each_share_to_within_the_number_of_datasets(weights, size):
    datasets = [[(which, index) for index in range(1000)] for which in range(len(weights))]
    blend, shares = Blend(datasets, weights, size), [weight / sum(weights) for weight in weights]
    taken, theirs = [0] * len(weights), [0] * len(weights)
    for number, megatrons in enumerate(megatron_blend(shares, size)):
        which, index = blend[number]
        assert index == taken[which], "a dataset's samples come in order"
        taken[which] += 1
        theirs[megatrons] += 1
        for share, have, megatron in zip(shares, taken, theirs, strict=True):
            assert abs(have - share * (number + 1)) <= 0.5 + share * len(weights) / 2 + 1e-9
            assert abs(have - megatron) <= len(weights)


@given(weights=WEIGHTS, index=st.integers(0, 10**12))
def test_the_place_of_a_sample_is_its_number_in_the_order_of_when_samples_are_due(weights, index):
    """At any number, in a blend that no table could hold."""
    blend = Blend([range(1000)] * len(weights), weights, 10**12 + 1)
    which, number = blend.place(index)
    due = (number + 0.5) / blend._shares[which]
    before = 0
    for other, share in enumerate(blend._shares.tolist()):
        near = max(0, int(due * share) - 3)
        before += near + sum(((near + j + 0.5) / share, other) < (due, which) for j in range(9))
    assert before == index


def test_the_rule_of_megatron_in_these_tests_is_megatrons():
    helpers = pytest.importorskip("megatron.core.datasets.helpers_cpp")
    for weights in ([0.3, 0.7], [0.2, 0.5, 0.1, 0.2]):
        of, numbers = np.zeros(500, np.int16), np.zeros(500, np.int64)
        helpers.build_blending_indices(of, numbers, np.array(weights), len(weights), 500, False)
        assert of.tolist() == megatron_blend(weights, 500)


def test_weights_of_any_size_are_proportions():
    blend = Blend([range(10), range(10), range(10)], [1e308, 1e308, 5e-324], 40)
    assert [blend.place(number)[0] for number in range(40)] == [0, 1] * 20
    for number in (-1, 40):
        with pytest.raises(IndexError):
            blend[number]
    with pytest.raises(DataError, match="dataset 1 of a blend has no samples"):
        Blend([range(10), range(0)], [1, 1], 5)


def test_a_blend_ends_with_the_first_dataset_that_is_used_up():
    assert len(Blend([range(10), range(1000)], [1, 3])) == 40
    with pytest.raises(DataError, match="one above 0 for each"):
        Blend([range(10)], [1, 2])


def test_a_blend_has_samples_of_one_length(tmp_path):
    write(tmp_path / "a", DOCUMENTS)
    with pytest.raises(DataError, match=r"samples of \[4, 5\] tokens"):
        Blend([IndexedTokens(tmp_path / "a", size) for size in (5, 4)], [1, 1])


def test_corpora_are_named_as_for_megatron(tmp_path):
    for name in "ab":
        write(tmp_path / name, DOCUMENTS)
    assert isinstance(open_corpora([str(tmp_path / "a")], 5, documents=True), IndexedTokens)
    blend = open_corpora(["0.7", f"{tmp_path}/a", "0.3", f"{tmp_path}/b"], 2)
    assert [one.prefix[-1] for one in blend.datasets] == ["a", "b"] and blend.seq_len == 2
    for words in (["a", "0.7"], ["0.7", "a", "b"], ["a", "b"], ["-1", "a", "2", "b"], []):
        with pytest.raises(DataError, match="names no corpora: give one PREFIX, or a weight above 0 before each"):
            open_corpora(words, 5)
