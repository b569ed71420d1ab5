"""Checkpoints on disk: to the bit, complete or absent, and nothing that is damaged is ever loaded."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import shutil
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint import HuggingFaceStorageReader

from megatron_ft.errors import CheckpointError
from megatron_ft.run import checkpoint
from megatron_ft.run.checkpoint import tensor_files
from megatron_ft.run.checkpoint.tensor_files import CODES
from megatron_ft.run.checkpoint.writer import sealed
from megatron_ft.utils import directory_lock, durable_file

POSITIONS, PARTS = 2, 3


def state_of(step: int, position: int = 0) -> dict:
    """A state like an engine's, different for every step and position."""
    made = torch.Generator().manual_seed(1000 * step + position)
    return {
        "model": {
            "layers.0.weight": torch.randn(16, 8, generator=made),
            "layers.0.bias": torch.randn(16, generator=made).bfloat16(),
            "layers.0.transposed": torch.randn(4, 6, generator=made).t(),
        },
        "optimizer": {
            "state": {0: {"step": torch.tensor(float(step)), "exp_avg": torch.randn(16, 8, generator=made)}},
            "param_groups": [{"lr": 1e-3 / (step + 1), "betas": (0.9, 0.95), "fused": None, "params": [0, 1]}],
        },
        "rng": torch.arange(13, dtype=torch.uint8) + step,
        "counters": [step, 2**60 + step, True],
        "nothing": torch.empty(0, 3),
    }


def save(directory: Path, step: int, attempt: str = "run-1", state=state_of) -> Path:
    receipts = [
        json.loads(json.dumps(checkpoint.write_part(directory, step, attempt, position, part)))
        for position in range(POSITIONS)
        for part in (checkpoint.snapshot(state(step, position), number, PARTS) for number in range(PARTS))
    ]
    meta = {"seed": 7, "step": step}
    return checkpoint.complete(
        directory, step, attempt, receipts, run_id="run", groups=PARTS, ranks_per_group=POSITIONS, meta=meta
    )


def same(one, other) -> bool:
    """Return whether both are equal to the bit, and of the same types."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and torch.equal(*(value.contiguous().reshape(-1).view(torch.uint8) for value in (one, other)))
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return repr(one) == repr(other)  # nan is nan, and -0.0 is not 0.0


# --- round trip -------------------------------------------------------------------------------------------------------


@st.composite
def any_tensor(draw):
    dtype = draw(st.sampled_from(list(CODES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = int(torch.Size(shape).numel()) * dtype.itemsize
    raw = bytearray(draw(st.binary(min_size=count, max_size=count)))
    if dtype == torch.bool:
        raw = bytearray(byte & 1 for byte in raw)
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(raw, dtype=torch.uint8).view(dtype).reshape(shape)


numpy = st.sampled_from(
    [np.float32(0.1), np.float64(0.1), np.int64(2**60), np.bool_(True)]
)  # np.linspace has given an lr
plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text("aä.#/\n", max_size=4), numpy)
keys = st.one_of(st.integers(-3, 3), st.sampled_from(["0", "1", "a", "a.b", "b", "__metadata__", "", "ö", "state"]))
states = st.recursive(
    st.one_of(any_tensor(), plain),
    lambda below: st.one_of(
        st.lists(below, max_size=4), st.lists(below, max_size=3).map(tuple), st.dictionaries(keys, below, max_size=4)
    ),
    max_leaves=12,
)


@given(states, st.integers(1, 4))
@settings(max_examples=60)
def test_any_state_comes_back_to_the_bit(tmp_path_factory, state, parts):
    directory = tmp_path_factory.mktemp("checkpoints")
    written = [
        checkpoint.write_part(directory, 0, "a", 0, checkpoint.snapshot(state, part, parts)) for part in range(parts)
    ]
    place = checkpoint.complete(directory, 0, "a", written, run_id="r", groups=parts, ranks_per_group=1)
    found = checkpoint.newest(directory)
    assert found.path == str(place) and same(checkpoint.load(found, 0), state)
    shutil.rmtree(directory)


def test_every_position_comes_back_with_the_part_that_the_caller_asks_for(tmp_path):
    place = save(tmp_path, 5)
    found = checkpoint.newest(tmp_path)
    for position in range(POSITIONS):
        assert same(checkpoint.load(found, position), state_of(5, position))
    assert found.step == 5 and found.manifest["meta"] == {"seed": 7, "step": 5} and found.manifest["groups"] == PARTS
    checkpoint.verify(found)
    assert checkpoint.inspect(place) == found
    with pytest.raises(CheckpointError, match=f"positions 0 to {POSITIONS - 1}, not 9"):
        checkpoint.load(found, 9)
    assert not list(place.rglob("*.tmp"))


def test_a_snapshot_does_not_follow_the_state(tmp_path):
    state = state_of(1)
    copied = [checkpoint.snapshot(state, part, PARTS) for part in range(PARTS)]
    for tensor in (state["model"]["layers.0.weight"], state["rng"]):
        tensor.fill_(0)
    written = [checkpoint.write_part(tmp_path, 1, "a", 0, part) for part in copied]
    checkpoint.complete(tmp_path, 1, "a", written, run_id="r", groups=PARTS, ranks_per_group=1)
    assert same(checkpoint.load(checkpoint.newest(tmp_path), 0), state_of(1))
    copies = [tensor for part in copied for tensor in part.tensors.values()]
    assert sum(tensor.nbytes for tensor in copies) == 16 * 8 * 4 * 2 + 16 * 2 + 24 * 4 + 4 + 13


def test_the_same_part_is_the_same_file_whichever_group_writes_it(tmp_path):
    """Two groups may write it: one that was taken for dead, and the one that took its part over."""
    once, again = (checkpoint.write_part(tmp_path, 1, "a", 0, checkpoint.snapshot(state_of(1), 0, 2)) for _ in "12")
    assert once == again


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_pytorchs_own_reader_loads_a_position(tmp_path):
    place = save(tmp_path, 3)
    state = state_of(3, 1)
    expected = {
        "model.layers.0.weight": state["model"]["layers.0.weight"],
        "model.layers.0.bias": state["model"]["layers.0.bias"],
        "model.layers.0.transposed": state["model"]["layers.0.transposed"],
        "optimizer.state.0.step": state["optimizer"]["state"][0]["step"],
        "optimizer.state.0.exp_avg": state["optimizer"]["state"][0]["exp_avg"],
        "rng": state["rng"],
        "nothing": state["nothing"],
    }
    target = {name: torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(target, storage_reader=HuggingFaceStorageReader(str(place / "position-0001")), no_dist=True)
    assert same(target, {name: tensor.contiguous() for name, tensor in expected.items()})


def test_a_tensor_of_a_type_that_the_format_lacks_is_refused():
    with pytest.raises(CheckpointError, match="state.a.1 is a torch.strided tensor of torch.complex128"):
        checkpoint.snapshot({"a": [1, torch.zeros(2, dtype=torch.complex128)]}, 0, 1)


# --- damage -----------------------------------------------------------------------------------------------------------


def part_of(place: Path) -> Path:
    return place / "position-0001" / "part-00002-of-00003.safetensors"


def cut(place):
    os.truncate(part_of(place), part_of(place).stat().st_size - 1)


def lengthen(place):
    with part_of(place).open("ab") as file:
        file.write(b"x")


def remove(place):
    part_of(place).unlink()


def no_skeleton(place):
    (place / "position-0001" / "skeleton.json").unlink()


def no_manifest(place):
    (place / "manifest.json").unlink()


def torn_manifest(place):
    os.truncate(place / "manifest.json", 300)


def empty_manifest(place):
    os.truncate(place / "manifest.json", 0)


def noise(place):
    (place / "manifest.json").write_bytes(bytes(range(256)))


def other_json(place):
    (place / "manifest.json").write_text("[1, 2]")


def flipped_digit(place):
    path = place / "manifest.json"
    path.write_text(path.read_text().replace('"seed": 7', '"seed": 3'))


def newer(place):
    (place / "manifest.json").write_text(json.dumps({"version": 2, "anything": "else"}))


def renamed(place):
    place.rename(place.with_name("step-00000099-x"))


def outside(place):
    body = json.loads((place / "manifest.json").read_text())["checkpoint"]
    body["files"]["../../../etc/hostname"] = {"bytes": 1, "sha256": ""}
    (place / "manifest.json").write_bytes(sealed(body))


SEEN_AT_ONCE = {
    cut: "bytes",
    lengthen: "bytes",
    remove: "part-00002-of-00003.safetensors cannot be read: No such file",
    no_skeleton: "skeleton.json cannot be read",
    no_manifest: "has no manifest.json: its save was not finished",
    torn_manifest: "manifest.json is damaged",
    empty_manifest: "manifest.json is damaged",
    noise: "manifest.json is damaged",
    other_json: "manifest.json is damaged",
    flipped_digit: "checksum does not fit",
    newer: "its format version is 2, this megatron_ft reads 1",
    renamed: "the directory was renamed",
    outside: "which cannot be part of a checkpoint",
}


@pytest.mark.parametrize("damage", SEEN_AT_ONCE, ids=lambda damage: damage.__name__)
def test_damage_that_is_seen_at_once_makes_the_previous_checkpoint_count(tmp_path, damage):
    save(tmp_path, 1)
    damage(save(tmp_path, 2))
    broken, good = checkpoint.find(tmp_path)
    assert good.complete and good.step == 1 and not broken.complete and SEEN_AT_ONCE[damage] in broken.reason
    said: list[str] = []
    found = checkpoint.newest(tmp_path, said.append)
    assert found.step == 1 and same(checkpoint.load(found, 1), state_of(1, 1))
    assert len(said) == 1 and "is not used" in said[0] and SEEN_AT_ONCE[damage] in said[0]
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        checkpoint.load(broken, 1)
    checkpoint.prune(tmp_path, 1, said.append)
    assert len(checkpoint.find(tmp_path)) == 2, (
        "later than the newest complete one, or with a manifest: not ours to delete"
    )


def test_a_run_does_not_begin_anew_while_no_finished_checkpoint_can_be_used(tmp_path):
    cut(save(tmp_path, 1))
    no_manifest(save(tmp_path, 2))
    with pytest.raises(
        CheckpointError, match=r"none of the 1 checkpoints .* restore the files of .*step-0+1-.*, or move"
    ):
        checkpoint.newest(tmp_path)


@pytest.mark.parametrize("name", ["manifest.json", "position-0000/part-00001-of-00003.safetensors"])
def test_a_pointer_of_git_lfs_is_no_damage_after_which_a_run_begins_anew(tmp_path, name):
    (save(tmp_path, 1) / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 17\n")
    with pytest.raises(CheckpointError, match=rf"{name}: is a pointer of Git LFS.*run `git lfs pull`"):
        checkpoint.newest(tmp_path)


FILES = ["manifest.json"] + [
    f"position-{position:04d}/{name}"
    for position in range(POSITIONS)
    for name in ("skeleton.json", *(f"part-{part:05d}-of-{PARTS:05d}.safetensors" for part in range(1, PARTS + 1)))
]


@pytest.fixture(scope="module")
def two_saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("saved")
    save(directory, 1)
    save(directory, 2)
    return directory


@given(st.sampled_from(FILES), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
@settings(max_examples=60)
def test_no_flipped_bit_anywhere_is_ever_loaded(tmp_path_factory, two_saved, name, where, bit):
    directory = tmp_path_factory.mktemp("checkpoints") / "copy"
    shutil.copytree(two_saved, directory)
    place = directory / "step-00000002-run-1"
    content = bytearray((place / name).read_bytes())
    content[int(where * len(content))] ^= 1 << bit
    (place / name).write_bytes(content)
    said: list[str] = []
    verified = checkpoint.newest(directory, said.append)
    assert verified is not None
    if verified.step == 2:  # a bit without meaning: one kind of white space became another
        assert name == "manifest.json" and not said
    else:
        assert verified.step == 1 and len(said) == 1 and str(place) in said[0]
    for found in checkpoint.find(directory):
        for position in range(POSITIONS) if found.complete else ():
            try:
                assert same(checkpoint.load(found, position), state_of(found.step, position))
            except CheckpointError:
                assert verified.step == 1 and found.step == 2 and name.startswith(f"position-{position:04d}")
        if found.step == 2 and found.complete:
            assert found.manifest["meta"] == {"seed": 7, "step": 2}
    shutil.rmtree(directory)


def test_a_file_changed_after_it_was_checked_is_noticed(tmp_path):
    place = save(tmp_path, 1)
    found = checkpoint.find(tmp_path)[0]
    for damage, message in ((cut, "it ends 1 bytes before"), (remove, "No such file")):
        damage(place)
        for use in (lambda: checkpoint.load(found, 1), lambda: checkpoint.verify(found)):
            with pytest.raises(CheckpointError, match=f"{message}|is damaged") as refused:
                use()
            assert part_of(place).name in str(refused.value)


def test_a_lying_header_takes_no_memory(tmp_path):
    """A shape of a billion numbers in a file of some bytes is noticed before anything is allocated."""
    place = save(tmp_path, 1)
    content = part_of(place).read_bytes()
    part_of(place).write_bytes(content.replace(b'"shape":[', b'"shape":[9')[: len(content)])
    with pytest.raises(CheckpointError, match="header cannot be read"):
        checkpoint.load(checkpoint.find(tmp_path)[0], 1)


def test_an_empty_directory_has_no_checkpoint(tmp_path):
    assert checkpoint.find(tmp_path / "never") == [] and checkpoint.newest(tmp_path / "never") is None
    (tmp_path / "step-7").mkdir()
    (tmp_path / "notes").write_text("mine")
    assert checkpoint.find(tmp_path) == [] and checkpoint.newest(tmp_path) is None
    with pytest.raises(CheckpointError, match="must be a directory"):
        checkpoint.find(tmp_path / "notes")


# --- receipts ---------------------------------------------------------------------------------------------------------


def receipts_of(directory, step=1, attempt="a", state=None):
    parts = [checkpoint.snapshot(state or state_of(step), part, 2) for part in range(2)]
    return [checkpoint.write_part(directory, step, attempt, 0, part) for part in parts]


def finish(directory, receipts, ranks=1):
    return checkpoint.complete(directory, 1, "a", receipts, run_id="r", groups=2, ranks_per_group=ranks)


def test_receipts_that_do_not_make_a_checkpoint_are_refused(tmp_path):
    good = receipts_of(tmp_path)
    other_values = receipts_of(tmp_path, attempt="b", state=state_of(1) | {"counters": [9]})
    of_other_values = good[0], other_values[1] | {"attempt": "a"}
    for receipts, ranks, message in (
        ([], 1, "cannot be completed"),
        (good[:1], 1, r"\[\(0, 1\)\] is missing"),
        (good, 2, r"\[\(1, 0\), \(1, 1\)\] is missing"),
        ([*good, good[0]], 1, "duplicate"),
        ([good[0], other_values[1]], 1, "attempt b"),
        ([good[0], receipts_of(tmp_path, step=2)[1]], 1, "step 2"),
        (of_other_values, 1, "must hold the same state"),
    ):
        with pytest.raises(CheckpointError, match=message):
            finish(tmp_path, receipts, ranks)
        assert not any(found.complete for found in checkpoint.find(tmp_path))
    finish(tmp_path, good)
    assert checkpoint.newest(tmp_path).step == 1


def test_a_directory_that_hosts_do_not_share_is_noticed(tmp_path):
    receipts = receipts_of(tmp_path)
    shutil.rmtree(tmp_path / "step-00000001-a" / "position-0000")
    with pytest.raises(CheckpointError, match="cannot open it.*that all hosts share"):
        finish(tmp_path, receipts)


# --- a file system that refuses ---------------------------------------------------------------------------------------


def mounted(tmp_path, options):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk], capture_output=True).returncode:
        pytest.skip("a tmpfs cannot be mounted here: needs root")
    return disk


@pytest.fixture
def small_disk(tmp_path):
    disk = mounted(tmp_path, "size=256k")
    yield disk
    subprocess.run(["umount", disk], check=True)


def test_a_full_disk_costs_that_save_only(small_disk):
    save(small_disk, 1)
    (small_disk / "filler").write_bytes(bytes(32 * 1024))
    large = checkpoint.snapshot({"w": torch.ones(2**18)}, 0, 1)
    with pytest.raises(CheckpointError, match="No space left on device.*free space"):
        checkpoint.write_part(small_disk, 2, "a", 0, large)
    assert not list(small_disk.rglob("*.tmp")), "what was written of it is gone"
    assert checkpoint.newest(small_disk).step == 1
    checkpoint.discard(small_disk, 2, "a")
    assert len(checkpoint.find(small_disk)) == 1
    save(small_disk, 3)
    assert checkpoint.newest(small_disk).step == 3


def test_a_disk_that_is_full_when_the_manifest_is_written(small_disk):
    receipts = receipts_of(small_disk)
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    with pytest.raises(CheckpointError, match="No space left on device"):
        finish(small_disk, receipts)
    assert checkpoint.newest(small_disk, [].append) is None
    (small_disk / "filler").unlink()
    finish(small_disk, receipts)
    assert checkpoint.newest(small_disk).step == 1


def test_a_read_only_file_system(tmp_path):
    disk = mounted(tmp_path, "ro,size=64k")
    try:
        with pytest.raises(CheckpointError, match="Read-only file system.*mount it for writing"):
            receipts_of(disk)
        with pytest.raises(CheckpointError, match="Read-only file system"):
            directory_lock.lock(disk, "run")
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_file_larger_than_this_user_may_write(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    part = checkpoint.snapshot({"w": torch.ones(2**18)}, 0, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, hard))
    try:
        with pytest.raises(CheckpointError, match="File too large.*ulimit -f"):
            checkpoint.write_part(tmp_path, 1, "a", 0, part)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_directory_that_is_gone_or_none(tmp_path):
    (tmp_path / "file").touch()
    for directory, message in (
        (tmp_path / "gone", "removed or unmounted"),
        (tmp_path / "file" / "below", "a part of its path is a file"),
    ):
        with pytest.raises(CheckpointError, match=message) as refused:
            receipts_of(directory)
        assert str(directory) in str(refused.value)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EIO, errno.EDQUOT, errno.ESTALE, errno.EHOSTDOWN])
def test_every_error_of_the_system_becomes_one_error_with_a_remedy(tmp_path, monkeypatch, code):
    def refuse(fd):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(durable_file.os, "fsync", refuse)
    with pytest.raises(CheckpointError, match=f"{os.strerror(code)}; \\w+"):
        receipts_of(tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_every_name_becomes_durable_only_after_its_content_and_the_manifest_last(tmp_path, monkeypatch):
    """The effects of a power cut cannot be tried here; that nothing is renamed before it is synced can."""
    done: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def name_of(fd):
        return os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), tmp_path)

    monkeypatch.setattr(os, "fsync", lambda fd: (done.append(("sync", name_of(fd))), fsync(fd)))

    def renamed(old, new):
        assert ("sync", os.path.relpath(old, tmp_path)) in done
        done.append(("rename", os.path.relpath(new, tmp_path)))
        replace(old, new)

    monkeypatch.setattr(os, "replace", renamed)
    place = finish(tmp_path, receipts_of(tmp_path)).name
    renames = [index for index, (what, _) in enumerate(done) if what == "rename"]
    for index in renames:
        assert done[index + 1] == ("sync", os.path.dirname(done[index][1]))
    assert [done[index][1] for index in renames][-1] == f"{place}/manifest.json"
    for directory in (".", place, f"{place}/position-0000"):  # their entries are durable before the manifest is
        assert ("sync", directory) in done[: renames[-1]]


# --- pruning ----------------------------------------------------------------------------------------------------------


def test_old_and_abandoned_ones_are_deleted_and_nothing_else(tmp_path):
    for step in (1, 2, 4, 5):
        save(tmp_path, step)
    for step in (3, 5, 6):
        receipts_of(tmp_path, step, "abandoned")
    (tmp_path / "mine").mkdir()
    gone = checkpoint.prune(tmp_path, 2)
    assert sorted(Path(path).name for path in gone) == [
        "step-00000001-run-1",
        "step-00000002-run-1",
        "step-00000003-abandoned",
    ]
    left = {"step-00000004-run-1", "step-00000005-run-1", "step-00000005-abandoned", "step-00000006-abandoned", "mine"}
    assert {path.name for path in tmp_path.iterdir()} == left


def test_an_old_one_that_cannot_be_deleted_stops_no_save(tmp_path, monkeypatch):
    for step in (1, 2):
        save(tmp_path, step)

    def refuse(path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    said: list[str] = []
    monkeypatch.setattr(shutil, "rmtree", refuse)
    assert checkpoint.prune(tmp_path, 1, said.append) == []
    assert len(said) == 1 and "could not be deleted" in said[0]
    assert [found.complete for found in checkpoint.find(tmp_path)] == [True, False], "its manifest went first"
    monkeypatch.undo()
    assert len(checkpoint.prune(tmp_path, 1)) == 1


def test_a_writer_that_wakes_up_late_changes_nothing_that_counts(tmp_path):
    late = checkpoint.snapshot(state_of(1), 0, 2)
    save(tmp_path, 1, "second")
    save(tmp_path, 2)
    checkpoint.prune(tmp_path, 2)
    checkpoint.write_part(tmp_path, 1, "first", 0, late)
    assert [found.step for found in checkpoint.find(tmp_path) if found.complete] == [2, 1]
    checkpoint.prune(tmp_path, 2)
    assert len(checkpoint.find(tmp_path)) == 2


# --- beside training --------------------------------------------------------------------------------------------------


def test_one_save_runs_at_a_time_and_its_result_is_returned_once():
    saver, begin, go_on = checkpoint.Saver(), threading.Event(), threading.Event()

    def work():
        begin.set()
        go_on.wait()
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert saver.poll() is None and saver.start("step 1", work) is None
    begin.wait()
    assert saver.poll() is None and saver.busy
    assert "step 2 is not saved: step 1 is still being written" in saver.start("step 2", work)
    go_on.set()
    saved = saver.wait()
    assert saved.what == "step 1" and saved.error is None and saved.took_s >= 0
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert saved.value == min(own + 10, 19), "training comes first, whatever the nice value of the process"
    assert saver.poll() is None and saver.start("step 2", work) is None
    saver._thread.join()
    assert "the result of step 2 has not been polled yet" in saver.start("step 3", work)
    assert saver.wait().what == "step 2"


def test_a_failed_save_is_reported_and_raised_nowhere(tmp_path):
    saver = checkpoint.Saver()
    part = checkpoint.snapshot(state_of(1), 0, 1)
    saver.start("step 1", lambda: checkpoint.write_part(tmp_path / "gone", 1, "a", 0, part))
    assert "removed or unmounted" in saver.wait().error
    saver.start("step 2", lambda: 1 / 0)
    saved = saver.wait()
    assert saved.value is None and saved.error == "ZeroDivisionError: division by zero"
    saver.start("step 3", lambda: checkpoint.write_part(tmp_path, 3, "a", 0, part))
    assert saver.wait().value["position"] == 0


def test_a_part_of_an_attempt_that_was_given_up_names_that_and_no_unmounted_directory(tmp_path, monkeypatch):
    part = checkpoint.snapshot(state_of(1), 0, 1)
    write = durable_file.write

    def removed_before(path, pieces):
        shutil.rmtree(path.parents[1])
        return write(path, pieces)

    monkeypatch.setattr(durable_file, "write", removed_before)
    with pytest.raises(CheckpointError, match="this attempt was given up meanwhile"):
        checkpoint.write_part(tmp_path, 1, "a", 0, part)


@pytest.mark.parametrize("name", ["manifest.json", "part"])
def test_a_fifo_in_the_place_of_a_file_does_not_hold_up_a_start(tmp_path, name):
    place = save(tmp_path, 5)
    path = part_of(place) if name == "part" else place / name
    path.unlink()
    os.mkfifo(path)
    (found,) = checkpoint.find(tmp_path)
    assert not found.complete and path.name in found.reason
    with pytest.raises(OSError, match="is a FIFO"):
        tensor_files.decode(path, "")


def test_a_file_that_a_link_leads_to_and_one_of_another_user_are_read(tmp_path):
    """A directory of the team; files that were moved to another disk. The checksums decide."""
    place = save(tmp_path, 5)
    path = part_of(place)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    if os.geteuid() == 0:
        os.chown(tmp_path / "elsewhere", 65534, 65534)
    assert same(checkpoint.load(checkpoint.find(tmp_path)[0], 1), state_of(5, 1))
