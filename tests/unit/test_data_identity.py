"""The values that ranks compare before they train together, and the errors when they differ."""

from __future__ import annotations

import functools

import pytest

from megatron_ft.config import schema
from megatron_ft.data.dataset import PackedDataset
from megatron_ft.errors import DataError
from megatron_ft.run import data_identity
from megatron_ft.run.data_identity import Identities, difference


class Store:
    """The part of ``CoordinationClient`` that these tests need, shared by all ranks."""

    def __init__(self) -> None:
        self.keys = {}

    def settle(self, key, value):
        return self.keys.setdefault(key, value)

    def put(self, key, value):
        self.keys[key] = value


class Custom:
    def __init__(self, fingerprint) -> None:
        self.fingerprint = fingerprint

    def batch(self, microbatch):
        return microbatch


def packed(directory, **changes) -> PackedDataset:
    numbers = {"seq_len": 32, "samples_per_microbatch": 2, "groups": 2, "microbatches_per_group": 4, "seed": 1}
    return PackedDataset(directory, **{**numbers, **changes})


def ranks(number: int, begins: bool = True) -> tuple[Store, list[Identities]]:
    store = Store()
    return store, [Identities(store, group, 0, begins) for group in range(number)]


@pytest.mark.parametrize(
    ("change", "name", "values"),
    [
        ({"seq_len": 16}, "sequence length", ("16", "32")),
        ({"seed": 7}, "seed of the dataset", ("7", "1")),
        ({"samples_per_microbatch": 4}, "samples per microbatch of the dataset", ("4", "2")),
    ],
)
def test_a_rank_with_another_dataset_is_refused_with_both_values_and_hosts(data_dir, monkeypatch, change, name, values):
    store = Store()
    for host, group, dataset in (("here", 0, packed(data_dir)), ("there", 1, packed(data_dir, **change))):
        monkeypatch.setattr(data_identity.socket, "gethostname", lambda host=host: host)
        own = Identities(store, group, 0, begins=True)
        if group == 0:
            own.agree("data", data_identity.of_data(dataset))
            continue
        with pytest.raises(DataError) as caught:
            own.agree("data", data_identity.of_data(dataset))
        said = str(caught.value)
    mine, theirs = values
    assert said.startswith(f"{name} is {mine} for rank 0 of group 1 on there")
    assert f"rank 0 of group 0 on here trains with {theirs}" in said
    assert store.keys[data_identity.REFUSED] == said


def test_a_prepared_dataset_is_known_by_its_tokens_and_its_tokenizer(data_dir):
    found = data_identity.of_data(packed(data_dir))
    meta = packed(data_dir).meta
    assert found["dataset fingerprint"] == meta.tokens_sha256 and found["tokenizer"] == meta.tokenizer_sha256


@pytest.mark.parametrize("fingerprint", ["abc", 7, lambda: "abc", {"shards": [1, 2]}])
def test_a_custom_dataset_may_have_a_fingerprint(fingerprint):
    _, (one, other, third) = ranks(3)
    one.agree("data", data_identity.of_data(Custom(fingerprint)))
    other.agree("data", data_identity.of_data(Custom(fingerprint).batch))
    with pytest.raises(DataError, match="dataset fingerprint is another for rank 0 of group 2 on "):
        third.agree("data", data_identity.of_data(Custom("another")))


def test_a_fingerprint_that_cannot_be_compared_is_refused():
    with pytest.raises(DataError, match="fingerprint of the dataset is a object; it must be text"):
        data_identity.of_data(Custom(object()))


def test_a_dataset_that_is_not_known_yet_is_not_compared():
    store, (one,) = ranks(1)
    one.agree("data", data_identity.of_data(None))
    assert store.keys == {}


def test_a_function_without_a_fingerprint_is_known_by_the_dataset_that_it_reads():
    known = Custom("abc")
    for dataset in (None, lambda microbatch: known.batch(microbatch), known):
        assert data_identity.of_data(dataset, known) == {"dataset fingerprint": "abc"}
    assert data_identity.of_data(Custom("another"), known) == {"dataset fingerprint": "another"}


WITHOUT = [lambda microbatch: microbatch, functools.partial(max, 1), Custom(None).batch]


@pytest.mark.parametrize("dataset", WITHOUT)
def test_datasets_without_a_fingerprint_are_taken_for_equal(dataset):
    _, (one, other) = ranks(2)
    assert data_identity.of_data(dataset) == data_identity.of_data(WITHOUT[0])
    one.agree("data", data_identity.of_data(WITHOUT[0]))
    other.agree("data", data_identity.of_data(dataset))


@pytest.mark.parametrize("dataset", WITHOUT)
def test_a_dataset_without_a_fingerprint_beside_one_with_is_refused_whichever_is_first(dataset, data_dir):
    for known, shown in ((Custom("abc"), "abc"), (packed(data_dir), packed(data_dir).meta.tokens_sha256)):
        _, (one, other) = ranks(2)
        one.agree("data", data_identity.of_data(known))
        with pytest.raises(DataError, match=rf"fingerprint is none for rank 0 of group 1 on .* trains with {shown};"):
            other.agree("data", data_identity.of_data(dataset))
        _, (one, other) = ranks(2)
        one.agree("data", data_identity.of_data(dataset))
        with pytest.raises(DataError, match=rf"fingerprint is {shown} for rank 0 of group 1 on .* trains with none;"):
            other.agree("data", data_identity.of_data(known))


def test_a_dataset_may_get_a_fingerprint_after_a_checkpoint_but_not_lose_it():
    _, (one, other) = ranks(2)
    one.agree("data", data_identity.of_data(Custom("abc")), ("ckpt/step-7", {"dataset fingerprint": None}))
    with pytest.raises(DataError, match="fingerprint is none for .*, but checkpoint ckpt/step-7 was saved with abc"):
        other.agree("data", data_identity.of_data(WITHOUT[0]), ("ckpt/step-7", {"dataset fingerprint": "abc"}))


def test_the_seed_of_the_run_is_compared_without_a_dataset():
    _, (one, other) = ranks(2)
    seeds = [schema.resolve({"fault_tolerance": {"seed": seed}}, groups=2) for seed in (1, 2)]
    one.agree("run", data_identity.of_run(seeds[0], 5))
    with pytest.raises(DataError, match="seed is 2 for rank 0 of group 1 on .*rank 0 of group 0 on .* trains with 1"):
        other.agree("run", data_identity.of_run(seeds[1], 5))


@pytest.mark.parametrize("begins", [True, False], ids=["at the start", "a group that comes back"])
def test_the_number_of_steps_is_compared(begins):
    """A job that goes on from a checkpoint may have another number: only the ranks of one run are compared."""
    store, (one, _) = ranks(2)
    other, config = Identities(store, 1, 0, begins), schema.resolve({}, groups=2)
    one.agree("run", data_identity.of_run(config, 20))
    with pytest.raises(
        DataError, match=r"number of steps .* is 15 for rank 0 of group 1 on .* trains with 20; give all"
    ):
        other.agree("run", data_identity.of_run(config, 15))
    assert (data_identity.REFUSED in store.keys) == begins


def test_a_group_that_comes_back_with_other_data_ends_alone():
    store, (one, other) = ranks(2, begins=False)
    one.agree("data", {"dataset fingerprint": "a"})
    with pytest.raises(DataError):
        other.agree("data", {"dataset fingerprint": "b"})
    assert data_identity.REFUSED not in store.keys


def test_a_checkpoint_of_other_data_is_refused_and_one_that_records_less_is_not():
    _, (one, other) = ranks(2)
    mine = {"dataset fingerprint": "a", "sequence length": 32}
    one.agree("data", mine, ("ckpt/step-7", {"sequence length": 32, "seed": 5}))
    assert one.agreed == mine
    with pytest.raises(
        DataError, match=r"fingerprint is a for .*, but checkpoint ckpt/step-7 was saved with b; start with"
    ):
        other.agree("data", mine, ("ckpt/step-7", {"dataset fingerprint": "b"}))


def test_difference_names_what_only_one_has():
    assert difference({"a": 1}, {"a": 1}) is None
    assert difference({"a": 1}, {}) == ("a", 1, None)
    assert difference({"a": 1}, {"a": 1, "b": 2}) == ("b", None, 2)
