"""Files in directories where other users may create names: no link is followed, no FIFO waits, no file of another user is
believed; and files that are replaced atomically, by processes that may share host name and process id."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ft.cluster.faults.injector import Injector
from megatron_ft.config.schema import resolve
from megatron_ft.core.lifecycle.store_failover import Claim
from megatron_ft.data import dataset
from megatron_ft.errors import CheckpointError, FTError, LaunchError
from megatron_ft.host import run_lock
from megatron_ft.record import history, run_directory
from megatron_ft.record.timeline import Timeline
from megatron_ft.run import injection_points, progress_counters
from megatron_ft.run.injection_points import InjectionPoints
from megatron_ft.run.store import claim_log
from megatron_ft.types import given
from megatron_ft.utils import directory_lock, durable_file, shared_file, vital_thread
from megatron_ft.utils.auth import secret
from megatron_ft.utils.auth.secret import Secret
from tests.sources import MODULES, PACKAGE, nodes

MOVES = {
    "utils/shared_file.py",
    "record/run_directory.py",  # moves the files of an earlier start into a new directory
    "data/dataset.py",  # writes to a temporary directory with a random name
    "data/corpus.py",
    "run/checkpoint/export.py",  # moves a whole directory into place
}


def test_writers_with_the_same_host_name_and_process_id_never_tear_a_file(tmp_path):
    """Two containers whose agents are both process 1 do this; here two threads of one process stand for them."""
    path, failed = tmp_path / "ranks.json", []

    def write(number: int) -> None:
        try:
            for _ in range(300):
                shared_file.write_json(path, [{"writer": number}] * (200 * number))
        except OSError as error:
            failed.append(error)

    shared_file.write_json(path, [])
    writers = [threading.Thread(target=write, args=(number,)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        found = json.loads(path.read_text())
        assert len({entry["writer"] for entry in found}) <= 1
    assert not failed
    assert os.listdir(tmp_path) == ["ranks.json"]


def test_a_file_that_exists_is_not_created_again(tmp_path):
    path = tmp_path / "decision"
    assert shared_file.create(path, "first") and not shared_file.create(path, "second")
    assert path.read_text() == "first" and os.listdir(tmp_path) == ["decision"]


CHILD = """
import resource, sys
from pathlib import Path
from megatron_ft.utils import shared_file as atomic
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
atomic.write(Path(sys.argv[1]), b"x" * 1000)
"""


def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path):
    path = tmp_path / "file"
    shared_file.write(path, "old")
    done = subprocess.run([sys.executable, "-c", CHILD, path], capture_output=True, text=True)
    assert "File too large" in done.stderr
    assert path.read_text() == "old" and os.listdir(tmp_path) == ["file"]


def test_no_module_has_an_atomic_write_of_its_own():
    for path in {str(one.relative_to(PACKAGE)) for one in MODULES} - set(MOVES):
        calls = (call.func for call in calls_in(PACKAGE / path))
        names = {call.attr for call in calls if isinstance(call, ast.Attribute) and is_os(call.value)}
        assert not {"replace", "rename", "link"} & names, f"{path}: use ``utils.shared_file``"


def is_os(value: ast.expr) -> bool:
    return isinstance(value, ast.Name) and value.id == "os"


def calls_in(path: Path) -> list[ast.Call]:
    return [node for node in nodes(path) if isinstance(node, ast.Call)]


# --- hostile directories ----------------------------------------------------------------------------------------------

STRANGER = 65534
PLANTS = ["a link", "a FIFO", "a device", "of another user"]


def plant(path: Path, kind: str, victim: Path) -> None:
    """Put what another user can put into a directory in which he may create names."""
    if kind == "a link":
        path.symlink_to(victim)
        return
    if kind == "a FIFO":
        os.mkfifo(path, 0o666)
    elif os.geteuid() != 0:
        pytest.skip("only root can make a device or a file of another user")
    elif kind == "a device":
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    else:
        path.write_bytes(victim.read_bytes())
    if os.geteuid() == 0:
        os.chown(path, STRANGER, STRANGER)


REFUSED = (OSError, FTError)


def refuses(call, *arguments, **options) -> None:
    with pytest.raises(REFUSED):
        call(*arguments, **options)


def _record(run_dir: Path) -> None:
    refuses(history.append, run_dir, "stop", reason="x")
    refuses(history.read, run_dir)
    own = history.History(run_dir)
    own.set_writer(True)
    own.record("step", step=0)  # a record that cannot be written does not end training


def _timeline(run_dir: Path) -> None:
    own = Timeline(run_dir, 0, 0)
    own.assign(0, 0)
    own.write()


def _injector(run_dir: Path) -> None:
    with Injector._alone(SimpleNamespace(_run_dir=run_dir)):
        pass


def _mailbox(run_dir: Path) -> None:
    points = InjectionPoints(0, [], run_dir=run_dir)
    points._poll()
    assert not points._orders


def _prepare(directory: Path) -> None:
    with dataset._stage(directory, print):
        pass


def _claim_log(run_dir: Path) -> None:
    assert claim_log.Log(run_dir, "run", Secret("s" * 64)).read() == ()


def _told(directory: Path) -> None:
    assert claim_log.read_told(directory / "told") == -1


def _other_record(run_dir: Path) -> None:
    assert history.read(run_dir) == []


OPENERS = {
    "record": (history.FILE, _record),
    "record of another process": ("history.x-1.jsonl", _other_record),
    "timeline": ("timeline/g0.p0.jsonl", _timeline),
    "log of a rank": ("g0.p0.log", lambda at: refuses(shared_file.append_to, at / "g0.p0.log")),
    "output of a rank": ("g0.p0.log", lambda at: refuses(shared_file.read_record, at / "g0.p0.log")),
    "error of a rank": ("g0.p0.error", lambda at: vital_thread.leave_error("why", path=at / "g0.p0.error")),
    "secret that is made": (secret.FILE, lambda at: refuses(secret.make, at, {})),
    "secret that is read": (secret.FILE, lambda at: refuses(secret.load, at, environ={})),
    "lock of a run": (
        directory_lock.RUN.file,
        lambda at: refuses(run_lock.Claims(at, resolve({}, groups=2), "x", False).take),
    ),
    "lock of checkpoints": (directory_lock.CHECKPOINTS.file, lambda at: refuses(directory_lock.lock, at, "x")),
    "look at a lock": (
        directory_lock.CHECKPOINTS.file,
        lambda at: refuses(directory_lock.check_free, at, patience_s=0.0),
    ),
    "lock of prepare": (".lock", lambda at: refuses(_prepare, at)),
    "lock of an injector": ("faults/lock", lambda at: refuses(_injector, at)),
    "fault orders": ("faults/g0.p0.json", _mailbox),
    "configuration": ("config.json", lambda at: refuses(run_directory.size, at)),
    "newest claim": ("told", _told),
    "a part of a full disk": (".key", lambda at: refuses(shared_file.open_file, at / ".key", shared_file.APPENDS)),
    "pulse": ("g0.p0", lambda at: refuses(progress_counters.ProgressCounters, at / "g0.p0")),
    "pulse that is made": ("g0.p0", lambda at: progress_counters.create(at / "g0.p0")),
    "pulses of other agents": ("megatron_ft-pulses-x", lambda at: shutil.rmtree(progress_counters.directory(at))),
}
DIRECTORIES = {
    "logs": lambda at: run_directory.prepare(at, overwrite=False),
    "faults": lambda at: injection_points.post(at, 0, 0, (1, 1), []),
    "store": lambda at: claim_log.Log(at, "run", Secret("s" * 64)).create(Claim(0, "run", "h:1", 0, (), 0, "")),
    "step-7": lambda at: durable_file.make_directories(at, "step-7"),
}
"""Directories that are made inside of others, and the calls that make them."""


@pytest.fixture
def hostile(tmp_path):
    """A directory in which every user may create names, and a file of this user that lies elsewhere."""
    place, victim = tmp_path / "shared", tmp_path / "victim"
    for name in ("", "timeline", "faults"):
        (place / name).mkdir()
        (place / name).chmod(0o777)
    victim.write_text('{"t": 1, "event": "start", "run_id": "planted"}\n' + "0" * 64)
    victim.chmod(0o600)
    before = victim.read_bytes()
    signal.alarm(120)  # ends a process that waits for a FIFO
    yield place, victim
    signal.alarm(0)
    assert victim.read_bytes() == before and stat.S_IMODE(victim.stat().st_mode) == 0o600


@pytest.mark.parametrize("kind", PLANTS)
@pytest.mark.parametrize("name", OPENERS)
def test_no_opener_follows_waits_for_or_believes_what_another_user_has_put_there(hostile, name, kind):
    place, victim = hostile
    file, call = OPENERS[name]
    plant(place / file, kind, victim)
    call(place)


@pytest.mark.parametrize("name", DIRECTORIES)
def test_no_directory_is_made_through_a_link(hostile, name):
    place, victim = hostile
    elsewhere = victim.with_name("elsewhere")
    elsewhere.mkdir()
    if (place / name).exists():
        shutil.rmtree(place / name)
    (place / name).symlink_to(elsewhere)
    refuses(DIRECTORIES[name], place)
    assert not list(elsewhere.iterdir())


def test_pulses_are_elsewhere_while_shared_memory_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=4096))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    for name in ("tmp", "shm"):
        (tmp_path / name).mkdir()
    assert progress_counters.directory(tmp_path / "shm").parent == tmp_path / "tmp"
    assert not list((tmp_path / "shm").iterdir())


def test_the_pulses_of_another_user_are_not_removed(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("only root can make a directory of another user")
    theirs = tmp_path / "megatron_ft-pulses-x"
    theirs.mkdir()
    os.mkfifo(theirs / "g0.p0", 0o666)
    for path in (theirs, theirs / "g0.p0"):
        os.chown(path, STRANGER, STRANGER)
    with pytest.raises(
        shared_file.Refused, match=r"megatron_ft-pulses-x belongs to user 65534; only a directory of this"
    ):
        shared_file.open_directory(theirs)
    progress_counters.directory(tmp_path)
    assert (theirs / "g0.p0").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_hold_a_lock_and_one_who_has_is_named(tmp_path, monkeypatch):
    """The kernel's lock needs read access only, and a file of an earlier version may give it."""
    place = Path(tempfile.mkdtemp())
    place.chmod(0o755)
    try:
        directory_lock.lock(place, "first", heartbeats=False).release()
        path = place / directory_lock.CHECKPOINTS.file
        as_stranger = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups", "flock", "-x", path]
        assert subprocess.run([*as_stranger, "true"], capture_output=True).returncode != 0
        path.chmod(0o644)
        with subprocess.Popen(
            [*as_stranger, "sh", "-c", "echo; read x"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        ) as one:
            given(one.stdout).readline()
            monkeypatch.setattr(directory_lock, "DYING_S", 0.0)
            with pytest.raises(
                CheckpointError, match=rf"in use by no run, but .* held by pid {one.pid} of user 65534 \('flock"
            ):
                directory_lock.lock(place, "second", heartbeats=False)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            given(one.stdin).close()
        directory_lock.lock(place, "second", heartbeats=False).release()
    finally:
        shutil.rmtree(place)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user")
def test_a_file_of_another_user_counts_where_own_files_get_that_owner(tmp_path, monkeypatch):
    """An NFS server that maps root to nobody does that."""
    made = secret.make(tmp_path, {})
    os.chown(tmp_path, STRANGER, STRANGER)
    os.chown(tmp_path / secret.FILE, STRANGER, STRANGER)
    with pytest.raises(LaunchError, match="secret belongs to user 65534; only a regular file of this user or root"):
        secret.load(tmp_path, environ={})
    monkeypatch.setattr(shared_file, "_uid_in", lambda directory: STRANGER)
    assert secret.load(tmp_path, environ={}) == made


def test_new_files_are_private_and_nothing_is_truncated(tmp_path):
    for name, make in {
        "appended": lambda path: shared_file.append_to(path).close(),
        "locked": lambda path: os.close(shared_file.open_to_lock(path)),
        "replaced": lambda path: shared_file.write(path, "new"),
    }.items():
        make(tmp_path / name)
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o600
    (tmp_path / "locked").write_text("record")
    os.close(shared_file.open_to_lock(tmp_path / "locked"))
    assert (tmp_path / "locked").read_text() == "record"


OPENS = {
    "utils/shared_file.py": "the place for it",
    "commands/plan_command.py": "a path that the user names",
    "commands/inject_command.py": "a path that the user names",
    "proof/explore.py": "a path that the user names",
    "run/checkpoint/export.py": "in a new directory",
    "cluster/qualify/training_checks.py": "in a new directory with a random name",
    "host/forkserver.py": "a pipe",
    "cluster/launchers/ssh/remote.py": "the null device",
    "host/store_keeper.py": "the null device",
}
"""Modules that open files for writing without ``utils.shared_file``, and which files these are."""
_WRITES = {"write_text", "write_bytes", "touch", "mkstemp", "NamedTemporaryFile", "flock", "lockf"}


def opens_for_writing(call: ast.Call) -> bool:
    """Return whether a call opens a file for writing, locks it, or makes one; of a descriptor of ``shared_file`` it may."""
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name == "open" and isinstance(call.func, ast.Attribute) and is_os(call.func.value):
        return any(flag in ast.unparse(call) for flag in ("O_WRONLY", "O_RDWR", "O_CREAT", "O_APPEND", "O_TRUNC"))
    if name == "open":
        values = [one.value for one in [*call.args, *(k.value for k in call.keywords)] if isinstance(one, ast.Constant)]
        writes = any(isinstance(one, str) and set(one) <= set("rwaxbt+") and set(one) & set("wax+") for one in values)
        return writes and not (call.args and ast.unparse(call.args[0]).startswith(("shared_file.open", "fd")))
    return name in _WRITES


def test_one_module_opens_files_for_writing():
    for path in MODULES:
        found = [ast.unparse(call) for call in calls_in(path) if opens_for_writing(call)]
        expected = str(path.relative_to(PACKAGE)) in OPENS
        assert bool(found) == expected, (
            f"{path}, {found}: use ``utils.shared_file``, or say in OPENS which files these are"
        )
