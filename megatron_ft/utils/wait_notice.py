"""Threads beside a block of code, and lines of a process that waits: for what, and for how long already. Silence would
look like a hang."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from megatron_ft.utils.console import say


@contextlib.contextmanager
def beside(work: Callable[[threading.Event], None], name: str) -> Iterator[None]:
    """Run ``work`` in a thread while the block runs. It ends soon after the event that it gets is set; it has ended when the
    block is left, so that a later fork meets no other thread."""
    over = threading.Event()
    thread = threading.Thread(target=work, args=(over,), name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        # no limit: the thread was told to stop just before
        thread.join()


def notices(text: Callable[[], str], after_s: float) -> contextlib.AbstractContextManager[None]:
    """Print ``text()`` while the block runs: after ``after_s`` seconds, and then whenever the time has doubled. A thread
    calls it."""

    def tell(over: threading.Event) -> None:
        begun, due_s = time.monotonic(), after_s
        # no limit: a thread of its own; whoever has started it tells it to stop
        while not over.wait(begun + due_s - time.monotonic()):
            say(f"{text()} ({due_s:g} s so far)")
            due_s *= 2

    return beside(tell, "megatron_ft-notices")
