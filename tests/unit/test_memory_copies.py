"""Copies of checkpoint files in memory: stored by content, within a budget, copied to another host, and fetched from
it."""

from __future__ import annotations

import hashlib
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.lifecycle.checkpoint_policy import partner
from megatron_ft.errors import CheckpointError
from megatron_ft.host.checkpoint_cache import CheckpointCache
from megatron_ft.run import checkpoint
from megatron_ft.run.checkpoint import peer_copies
from megatron_ft.run.checkpoint.memory_copies import ReplicaCache
from tests.support import SECRET

RUN = "run"
KEY = SECRET.of(RUN)


def content(number: int, size: int = 1000) -> tuple[bytes, str, int]:
    data = bytes([number]) * size
    return data, hashlib.sha256(data).hexdigest(), size


@pytest.fixture
def shelf(tmp_path):
    return ReplicaCache(tmp_path / "ckpt", 3500, tmp_path)


def put(shelf: ReplicaCache, number: int) -> tuple[str, int]:
    data, digest, size = content(number)
    assert shelf.put([data[:300], data[300:]], digest, size)
    return digest, size


def test_a_copy_is_found_by_its_content(shelf):
    digest, size = put(shelf, 1)
    assert shelf.find(digest, size).read_bytes() == content(1)[0]
    assert shelf.find(digest, size + 1) is None and shelf.find(content(2)[1], size) is None


def test_the_oldest_make_room_and_a_copy_that_never_fits_is_left_out(shelf):
    held = [put(shelf, number) for number in range(5)]
    assert [shelf.find(*one) is not None for one in held] == [False, False, True, True, True]
    assert not shelf.put([b"x" * 4000], hashlib.sha256(b"x" * 4000).hexdigest(), 4000)
    assert shelf.find(*held[-1]) is not None, "nothing was thrown away for it"


def test_other_bytes_than_their_name_are_not_kept(shelf):
    assert not shelf.put([b"something else"], content(1)[1], 1000)
    assert not shelf.put([b""], "../../etc/passwd", 0)
    assert shelf.listed() == [] and not list(shelf.place.glob(".*"))


def test_without_memory_there_are_no_copies(tmp_path):
    shelf = ReplicaCache(tmp_path, 1e9, tmp_path / "no such place")
    assert not shelf.put([b"x"], hashlib.sha256(b"x").hexdigest(), 1) and shelf.listed() == []


def test_a_file_is_taken_only_if_it_equals_the_written_one(shelf, tmp_path):
    data, digest, size = content(1)
    (tmp_path / "good").write_bytes(data)
    (tmp_path / "bad").write_bytes(data[:-1] + b"!")
    assert not shelf.take(tmp_path / "bad", digest, size) and not shelf.take(tmp_path / "none", digest, size)
    assert shelf.take(tmp_path / "good", digest, size)


@pytest.fixture
def hosts(tmp_path):
    """Two agents, each with the memory of a host of its own."""
    made = []
    for number in range(2):
        (tmp_path / str(number)).mkdir()
        shelf = ReplicaCache(tmp_path / "ckpt", 1e6, tmp_path / str(number))
        made.append((shelf, CheckpointCache(shelf, "127.0.0.1", KEY)))
    yield made
    for _, each in made:
        each.close(over=True)


def eventually(condition) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_copy_is_passed_on_once_and_survives_its_host(hosts):
    (shelf, first), (other, second) = hosts
    first.partner = lambda: ("127.0.0.1", second.port)
    second.partner = lambda: ("127.0.0.1", first.port)
    digest, size = put(shelf, 1)
    eventually(lambda: other.find(digest, size) is not None)
    assert other.find(digest, size).read_bytes() == content(1)[0]
    shelf.find(digest, size).unlink()
    addresses = [("127.0.0.1", first.port), ("127.0.0.1", second.port)]
    assert peer_copies.fetch(shelf, addresses, KEY, digest, size).read_bytes() == content(1)[0]


def test_a_stranger_gets_nothing_and_a_missing_copy_is_not_found(hosts):
    (shelf, _), (other, second) = hosts
    digest, size = put(other, 1)
    there = [("127.0.0.1", second.port)]
    assert peer_copies.fetch(shelf, there, SECRET.of("another run"), digest, size) is None
    assert peer_copies.fetch(shelf, there, KEY, content(2)[1], size) is None
    assert peer_copies.fetch(shelf, [("127.0.0.1", 1)], KEY, digest, size) is None
    assert peer_copies.fetch(shelf, there, KEY, digest, size).read_bytes() == content(1)[0], "a rank of the run gets it"


def test_a_state_is_loaded_from_memory_if_the_disk_is_damaged_and_from_disk_if_memory_is(tmp_path, shelf):
    state = {"weight": torch.arange(100.0)}
    receipt = checkpoint.write_part(tmp_path, 3, "a", 0, checkpoint.snapshot(state, 0, 1))
    made = checkpoint.complete(tmp_path, 3, "a", [receipt], run_id=RUN, groups=1, ranks_per_group=1)
    ((name, entry),) = ((n, e) for n, e in receipt["files"].items() if n.endswith("safetensors"))
    assert shelf.take(made / name, entry["sha256"], entry["bytes"])
    whole = (made / name).read_bytes()
    (made / name).write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(checkpoint.inspect(made), 0)
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.verify(checkpoint.inspect(made))
    assert torch.equal(checkpoint.load(checkpoint.inspect(made), 0, shelf.find)["weight"], state["weight"])
    checkpoint.verify(checkpoint.inspect(made), shelf.find)
    (made / name).write_bytes(whole)
    copy = shelf.find(entry["sha256"], entry["bytes"])
    copy.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert torch.equal(checkpoint.load(checkpoint.inspect(made), 0, shelf.find)["weight"], state["weight"])
    checkpoint.verify(checkpoint.inspect(made), shelf.find)


@given(
    domains=st.dictionaries(st.integers(0, 6), st.sets(st.sampled_from("abc"), max_size=2), min_size=1),
    host=st.integers(0, 6),
)
def test_the_partner_is_another_host_in_another_domain_if_there_is_one(domains, host):
    found = partner(host, domains)
    others = domains.keys() - {host}
    assert (found is None) == (not others)
    if others:
        assert found in others
        apart = {other for other in others if not domains[other] & domains.get(host, set())}
        assert not apart or found in apart


def test_partners_form_a_ring():
    assert [partner(host, {0: (), 1: (), 2: ()}) for host in range(3)] == [1, 2, 0]
    assert [partner(host, {0: {"a"}, 1: {"a"}, 2: {"b"}, 3: {"b"}}) for host in range(4)] == [2, 2, 0, 0]
