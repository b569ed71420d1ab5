"""A process that waits says so, again and again with growing pauses, and leaves no thread."""

from __future__ import annotations

import threading

from megatron_ft.utils import wait_notice


def test_a_wait_is_announced_until_it_is_over(monkeypatch):
    said: list[str] = []
    twice = threading.Event()

    def say(line: str) -> None:
        said.append(line)
        if len(said) == 2:
            twice.set()

    monkeypatch.setattr(wait_notice, "say", say)
    before = threading.active_count()
    with wait_notice.notices(lambda: "host 1 waits for host 0", 0.01):
        twice.wait()
    assert said[:2] == [f"host 1 waits for host 0 ({seconds} s so far)" for seconds in ("0.01", "0.02")]
    assert threading.active_count() == before


def test_a_short_wait_is_silent(monkeypatch):
    monkeypatch.setattr(wait_notice, "say", lambda line: 1 / 0)
    with wait_notice.notices(lambda: "", 1000.0):
        pass
