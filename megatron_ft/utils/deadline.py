"""Calls that may hang: they run in a thread that is abandoned after a deadline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Outcome:
    """The result of a call, or the text of its error, or neither because it has not returned in time."""

    value: Any = None
    error: str | None = None
    abandoned: bool = False


class Call:
    """A call in a thread of its own, begun at once. The objects that it holds live as long as it hangs."""

    def __init__(self, name: str, function: Callable[[], Any]) -> None:
        self._outcomes: list[Outcome] = []
        self._function = function
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._outcomes.append(Outcome(self._function()))
        except Exception as error:  # the thread's outermost: else it would look like a hang
            self._outcomes.append(Outcome(error=f"{type(error).__name__}: {error}"))

    def within(self, timeout_s: float) -> Outcome:
        """Wait for its end, for ``timeout_s`` seconds at most."""
        self._thread.join(max(0.0, timeout_s))
        return self._outcomes[0] if self._outcomes else Outcome(abandoned=True)
