"""Samples packed from several documents: each token says which document it is of, and attends to no other."""

from __future__ import annotations

import json
import runpy

import numpy as np
import pytest
import torch

from megatron_ft.data import IndexedTokens, PackedDataset, prepare
from megatron_ft.types import Microbatch
from tests import support

SEQ_LEN = 24
SHAPE = {"samples_per_microbatch": 3, "groups": 1, "microbatches_per_group": 2, "seed": 7}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Documents of 2 to 21 tokens, and one that is longer than two samples."""
    directory = tmp_path_factory.mktemp("documents")
    texts = [f"day {number} " * (number % 5) for number in range(60)] + ["long " * 100]
    (directory / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare(directory / "out", [directory / "text.jsonl"], 290, log=lambda line: None)
    return directory / "out"


def example_model():
    found = runpy.run_path(str(support.ROOT / "examples" / "pretrain_gpt" / "model.py"))
    torch.manual_seed(0)
    return found["GPT"](found["GPTConfig"](290, layers=2, width=32, heads=2, seq_len=64)).eval()


def test_a_packed_sample_has_the_documents_that_megatrons_reader_finds(data):
    ours, theirs = (
        PackedDataset(data, SEQ_LEN, **SHAPE, documents=True),
        IndexedTokens(data / "tokens", SEQ_LEN, documents=True),
    )
    several = 0
    for index in range(len(ours)):
        sample, other = ours[index], theirs[index]
        assert sample.keys() == other.keys()
        for name in ("input_ids", "labels", "position_ids"):
            assert torch.equal(sample[name], other[name])
        assert torch.equal(sample["document_ids"], other["document_ids"] - other["document_ids"][0])
        several += bool(sample["document_ids"][-1])
        is_end = sample["input_ids"] == ours.meta.eod_id
        following = torch.from_numpy(ours.sample(index)[1:])
        assert torch.equal(sample["labels"], torch.where(is_end, -100, following)), "the next document is not predicted"
    assert 0 < several < len(ours)
    batch, microbatch = ours(Microbatch(0, 0, 1)), Microbatch(0, 0, 1)
    for name, values in batch.items():
        assert torch.equal(values, torch.stack([ours[index][name] for index in ours.indices(microbatch).tolist()]))


def test_it_is_part_of_what_ranks_compare(data):
    with_, without = (PackedDataset(data, SEQ_LEN, **SHAPE, documents=said) for said in (True, False))
    assert with_.identity != without.identity and "document_ids" not in without[0]


def test_the_logits_of_a_document_do_not_depend_on_those_beside_it():
    model, rng = example_model(), np.random.default_rng(0)
    one, other, third = (torch.from_numpy(rng.integers(0, 290, length)) for length in (9, 14, 5))

    def logits(*documents):
        """The logits of each of the documents, packed in this order."""
        lengths = [len(document) for document in documents]
        numbers = torch.repeat_interleave(torch.arange(len(documents)), torch.tensor(lengths))
        places = torch.cat([torch.arange(length) for length in lengths])
        found = model(torch.cat(documents)[None], numbers[None], places[None])[0]
        return found.split(lengths)

    alone = model(one[None])[0]
    packed = (logits(other, one, third)[1], logits(one, other)[0], logits(third, third, one)[2])
    for found in packed:
        torch.testing.assert_close(found, alone, rtol=1e-4, atol=1e-6)
    beside = model(torch.cat([other, one])[None])[0][len(other) :]
    assert not torch.allclose(beside, alone, rtol=1e-2), "without document_ids a document attends to the one before it"
