"""The output of launchers on a terminal, a file, or a terminal that is gone."""

import ast
import io
import os
import re
import runpy
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.table import Table

from megatron_ft.cluster.faults import kill
from megatron_ft.cluster.launchers import launcher_shim
from megatron_ft.errors import LaunchError
from megatron_ft.record import follow
from megatron_ft.utils.auth import handshake
from megatron_ft.utils.terminal import console
from tests.sources import MODULES, nodes

CODE = "from megatron_ft.utils.console import say, show; say('one'); show('two'); say('three'); print('went on')"


def test_a_terminal_that_has_gone_away_ends_nothing():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", CODE], stdout=subprocess.PIPE, stderr=write, text=True)
    os.close(write)
    assert done.stdout == "went on\n"


def test_a_message_has_a_prefix_and_a_table_has_none():
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert done.stderr == "megatron_ft: one\ntwo\nmegatron_ft: three\n"


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b1A\r\x7f\u202e"


def test_control_characters_of_others_reach_no_terminal():
    code = f"from megatron_ft.utils.console import say, show; say({HOSTILE!r}); show({HOSTILE!r})"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr
    assert said == "megatron_ft: {0}\n{0}\n".format(r"\x1b]0;owned\x07\x1b[2J\x9b1A\x0d\x7f\u202e")


def test_an_error_of_another_host_reaches_no_terminal(tmp_path):
    (tmp_path / "config.json").write_text('{"run_id": 1}')
    (tmp_path / "history.jsonl").write_text("")
    words = [sys.executable, "-m", "megatron_ft.cli", "leave", f"{tmp_path}/{HOSTILE}", "0"]
    said = subprocess.run(words, capture_output=True, text=True).stderr
    assert r"\x1b]0;owned\x07" in said and not set("\x1b\x07\x9b\x7f\u202e") & set(said)


def test_what_a_member_or_a_launcher_says_reaches_no_terminal(monkeypatch, capfd):
    def refuse(*_):
        raise LaunchError(HOSTILE)

    monkeypatch.setattr(launcher_shim, "find", refuse)
    monkeypatch.setattr(sys, "argv", ["launcher_shim", "--run-dir", "run", "train.py"])
    assert launcher_shim.main() == LaunchError.exit_code
    here, there = socket.socketpair()
    with there:
        handshake.Door._pass_on(SimpleNamespace(_admit=refuse, _name="state"), here, {})
    said = "".join(capfd.readouterr())
    assert said.count(r"\x1b]0;owned\x07") == 2 and not set("\x1b\x07\x9b\x7f\u202e") & set(said)


def test_the_demo_escapes_the_text_of_a_run(tmp_path, monkeypatch, capfd):
    """Its tables hold the reasons of views, which come from other processes."""
    path = Path(__file__).parents[2] / "examples" / "pretrain_gpt" / "demo.py"
    demo = runpy.run_path(str(path))
    patched = demo["main"].__globals__
    patched["launch"] = lambda *_: 1
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr(sys, "argv", ["demo", "--run-dir", f"{tmp_path}/{HOSTILE}"])
    assert demo["main"]() == 1

    def refuse(*_):
        raise LaunchError(HOSTILE)

    monkeypatch.setattr(kill, "strike", refuse)
    demo["strike"](tmp_path, [], None)
    said = "".join(capfd.readouterr())
    assert said.count(r"\x1b]0;owned") == 2 and not set("\x1b\x07\x9b\x7f\u202e") & set(said)


@pytest.mark.parametrize("colors", [False, True])
def test_the_record_of_a_run_reaches_no_terminal_as_it_is(colors):
    """The display of a live run, and tables; rich's own sequences are kept."""
    event = {"event": "not_saved", "reason": f"lost: {HOSTILE}"}
    table = Table("one")
    table.add_row(f"[red]{HOSTILE}")
    made = console(file=io.StringIO(), force_terminal=colors, width=200)
    follow.ProgressView(2, follow.Outputs(Path(), 1, "none"), made).update(event)
    made.print(table)
    shown = made.file.getvalue()
    assert shown.count(r"\x1b]0;owned") == 2
    assert "\x1b]" not in shown and "\x1b[2J" not in shown and not set("\x07\x9b\x7f\u202e") & set(shown)
    assert ("\x1b[31m" in shown) == colors


def test_commands_in_messages_are_quoted_for_the_shell():
    """A path with ``$(...)`` in it must not run anything when the line is pasted."""
    found = []
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, ast.JoinedStr):
                found += [f"{path}:{node.lineno}: {piece}" for piece in unquoted(node)]
    assert not found, "use shlex.quote or shlex.join"


def unquoted(text: ast.JoinedStr) -> list[str]:
    """Return the values in an f-string that stand in a command, and may have characters that the shell would read."""
    before, found = "", []
    for part in text.values:
        if isinstance(part, ast.Constant):
            before += part.value
            continue
        value = ast.unparse(part.value)
        opened = before.count("`") % 2 == 1
        command = opened or re.search(r"(megatron-ft (status|stop|join|leave)|chmod \S+) $", before)
        if command and not re.search(r"shlex|quoted|tried", value):
            found.append(value)
        before += "x"
    return found


def test_the_lines_of_a_run_name_its_directory_for_the_shell(capsys):
    view = follow.ProgressView(2, follow.Outputs(Path("r/a b$(touch X)"), 1, "none"), Console(width=200))
    view.update({"event": "start", "t": 0.0})
    assert (
        "watch: megatron-ft status 'r/a b$(touch X)'; stop: megatron-ft stop 'r/a b$(touch X)'"
        in capsys.readouterr().out
    )
