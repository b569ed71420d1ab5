"""Megatron's indexed corpora: what megatron-core writes is read, and it reads what is written here."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.data.indexed import Blend, IndexedTokens, open_corpora, write
from megatron_ft.data.loader import Loader
from megatron_ft.errors import DataError
from megatron_ft.types import Microbatch

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
    with pytest.raises(DataError, match="document 1 has tokens that uint16 cannot hold"):
        write(tmp_path / "corpus", [np.arange(3), np.array([70_000])], np.uint16)
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
    assert dataset[1]["document_ids"].tolist() == [2] * 10
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
    ],
)
def test_damaged_files_are_told(tmp_path, damage, words):
    write(tmp_path / "corpus", DOCUMENTS)
    damage(tmp_path / "corpus.bin")
    with pytest.raises(DataError, match=words):
        IndexedTokens(tmp_path / "corpus", 5)


@given(weights=st.lists(st.floats(0.01, 10), min_size=1, max_size=5), size=st.integers(1, 400))
def test_a_blend_has_each_share_to_within_the_number_of_datasets(weights, size):
    datasets = [[(which, index) for index in range(1000)] for which in range(len(weights))]
    blend = Blend(datasets, weights, size)
    taken = [0] * len(weights)
    for number in range(size):
        which, index = blend[number]
        assert index == taken[which], "a dataset's samples come in order"
        taken[which] += 1
        for share, have in zip(weights, taken, strict=True):
            assert abs(have - share / sum(weights) * (number + 1)) < len(weights)


def test_a_blend_ends_with_the_first_dataset_that_is_used_up():
    assert len(Blend([range(10), range(1000)], [1, 3])) == 40
    with pytest.raises(DataError, match="one above 0 for each"):
        Blend([range(10)], [1, 2])


def test_corpora_are_named_as_for_megatron(tmp_path):
    for name in "ab":
        write(tmp_path / name, DOCUMENTS)
    assert isinstance(open_corpora([str(tmp_path / "a")], 5, documents=True), IndexedTokens)
    blend = open_corpora(["0.7", f"{tmp_path}/a", "0.3", f"{tmp_path}/b"], 2)
    assert [one.prefix[-1] for one in blend.datasets] == ["a", "b"] and blend.seq_len == 2
    for words in (["a", "0.7"], ["0.7", "a", "b"], ["a", "b"], ["-1", "a", "2", "b"], []):
        with pytest.raises(DataError, match="names no corpora: give one PREFIX, or a weight above 0 before each"):
            open_corpora(words, 5)
