"""The secret of a run: its file, the users who may read it, and the environment variable."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.config.schema import RunConfig
from megatron_ft.errors import LaunchError
from megatron_ft.utils.auth import secret
from megatron_ft.utils.auth.secret import Secret

GIVEN = {secret.VARIABLE: "f" * 64}


def test_the_file_is_made_once_and_only_its_owner_may_read_it(tmp_path):
    made = secret.make(tmp_path, {})
    assert len(bytes.fromhex(made.text)) == 32
    assert stat.S_IMODE((tmp_path / secret.FILE).stat().st_mode) == 0o600
    assert secret.make(tmp_path, {}) == made == secret.load(tmp_path, environ={})
    assert secret.make(tmp_path / "..", {}) != made
    assert list(tmp_path.iterdir()) == [tmp_path / secret.FILE]


def test_a_host_waits_for_the_file(tmp_path):
    found = []
    waiting = threading.Thread(target=lambda: found.append(secret.load(tmp_path, 60.0, {})))
    waiting.start()
    made = secret.make(tmp_path, {})
    waiting.join()
    assert found == [made]


def test_the_variable_wins_and_is_written_for_later_commands(tmp_path):
    old = secret.make(tmp_path, {})
    assert secret.load(tmp_path / "nothing", environ=GIVEN).text == "f" * 64
    assert secret.make(tmp_path, GIVEN).text == "f" * 64 != old.text
    assert secret.load(tmp_path, environ={}).text == "f" * 64


@pytest.mark.parametrize("change", ["mode", "link", "pipe", "short", "missing"])
def test_a_file_that_others_may_read_or_have_put_there_is_refused(tmp_path, change):
    secret.make(tmp_path, {})
    path = tmp_path / secret.FILE
    if change == "mode":
        path.chmod(0o640)
    if change == "link":
        path.rename(tmp_path / "elsewhere")
        path.symlink_to(tmp_path / "elsewhere")
    if change == "pipe":
        path.unlink()
        os.mkfifo(path, 0o600)
    if change == "short":
        path.write_text("1234")
    if change == "missing":
        path.unlink()
    with pytest.raises(LaunchError, match=str(path)):
        secret.load(tmp_path, environ={})


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_told_the_owner_of_the_run():
    shared = Path(tempfile.mkdtemp())
    shared.chmod(0o755)
    try:
        secret.make(shared, {})
        child = os.fork()
        if child == 0:
            os.setuid(65534)
            try:
                secret.load(shared, environ={})
            except LaunchError as error:
                os._exit(7 if "only the user who has started the run" in str(error) else 8)
            os._exit(9)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    finally:
        shutil.rmtree(shared)


@pytest.mark.parametrize("text", ["short", "with a blank " + "f" * 40, "\n" + "f" * 40])
def test_a_bad_variable_is_refused_with_a_remedy(text):
    with pytest.raises(LaunchError, match="openssl rand -hex 32"):
        secret.given({secret.VARIABLE: text})


def test_a_rank_gets_the_secret_by_its_environment_and_never_shows_it():
    env = RankEnvironment("run", 1, 0, "h:1", "127.0.0.1", Path("x"), RunConfig(groups=2), secret=Secret("s" * 64))
    given = env.to_env()
    assert RankEnvironment.from_env(given).secret.text == given[secret.VARIABLE] == "s" * 64
    for host_rank in (None, 0, 3):
        assert RankEnvironment.from_env(replace(env, host_rank=host_rank).to_env()).host_rank == host_rank
    assert "ssss" not in repr(env) and "ssss" not in repr(env.key)
    assert "ssss" not in "".join(text for name, text in given.items() if name != secret.VARIABLE)


def test_keys_differ_by_purpose_and_parts():
    key = Secret("a" * 64)
    keys = [key, key.of("store"), key.of("store", "run"), key.of("storerun"), key.of("st", "orerun")]
    assert len(set(keys)) == len(keys)
    assert key.mac(b"ab", b"c") != key.mac(b"a", b"bc")
