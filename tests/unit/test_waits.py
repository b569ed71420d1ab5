"""Every wait of the package has a limit or a documented reason to end; read from the code."""

import ast

import pytest

from tools import waits


def test_every_wait_without_a_limit_has_a_reason_to_end():
    found = {wait.key for wait in waits.waits() if wait.limit is None}
    assert not found - waits.UNBOUNDED.keys(), "give each a timeout, or name it in tools/waits.py with the reason"
    assert not waits.UNBOUNDED.keys() - found, "these waits are gone, or have a limit: remove them from tools/waits.py"


def test_the_page_lists_every_wait():
    assert waits.PAGE.read_text(encoding="utf-8") == waits.page(), "run `python -m tools.waits`"


def test_select_is_used_nowhere():
    """It takes no descriptor of 1,024 or more."""
    assert not [wait for wait in waits.waits() if wait.call == "select"]


@pytest.mark.parametrize(
    "code, limits",
    [
        ("thread.join()", [None]),
        ("thread.join(5.0)", ["5.0"]),
        ("', '.join(words)", []),
        ("event.wait()", [None]),
        ("event.wait(timeout=None)", [None]),
        ("process.wait(timeout=_END_S)", ["_END_S = 3"]),
        ("jobs.get()", [None]),
        ("jobs.get(timeout=left)", ["left"]),
        ("words.get('key')", []),
        ("changed.wait_for(is_due)", [None]),
        ("lock.acquire()", [None]),
        ("end.accept()", [None]),
        ("end.settimeout(None)", [None]),
        ("end.settimeout(3.0)", []),
        ("socket.create_connection(where)", [None]),
        ("socket.create_connection(where, timeout=2)", ["2"]),
        ("subprocess.run(command)", [None]),
        ("os.waitpid(pid, 0)", [None]),
        ("os.waitpid(pid, os.WNOHANG)", []),
        ("process.poll()", []),
        ("poll.poll(None)", [None]),
        ("select.select([end], [], [])", [None]),
        ("fcntl.flock(lock, fcntl.LOCK_EX)", [None]),
        ("while True:\n    sleep()", [None]),
        ("while True:\n    if now() > deadline:\n        break\n    sleep()", ["now() > deadline"]),
        ("while not done():\n    sleep(0.1)", [None, "0.1"]),
        ("while True:\n    event.wait(0.1)", [None, "0.1"]),
        ("while not event.wait(0.1):\n    look()", [None, "0.1"]),
        ("wait_for(a, b)", [None]),
        ("wait_for(a, lambda: over or now() > deadline)", ["now() > deadline"]),
        ("wait_for(a, lambda: over and now() > deadline)", [None]),
        ("event.wait(1 if f else None)", [None]),
        ("while True:\n    deadline = 3\n    sleep(0.1)", [None, "0.1"]),
        ("while True:\n    if now() > deadline:\n        complain()\n    sleep(0.1)", [None, "0.1"]),
        ("while not done() and monotonic() < deadline:\n    sleep(0.1)", ["monotonic() < deadline", "0.1"]),
        ("while not done() or monotonic() < deadline:\n    sleep(0.1)", [None, "0.1"]),
        ("while not (done() or monotonic() > deadline):\n    sleep(0.1)", ["monotonic() > deadline", "0.1"]),
        ("while True:\n    if lost and monotonic() > deadline:\n        raise E\n    sleep(0.1)", [None, "0.1"]),
        (
            "while True:\n    for a in b:\n        if now() > deadline:\n            break\n    sleep(0.1)",
            [None, "0.1"],
        ),
        ("while jobs:\n    jobs.pop()", []),
    ],
)
def test_a_wait_is_recognised(code, limits):
    assert [wait.limit for wait in waits._Reader("file.py", ast.parse(f"_END_S = 3\n{code}")).found] == limits
