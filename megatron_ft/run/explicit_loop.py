"""A script's own loop over the microbatches of a step, in place of a loss function.

The protocol calls a loss function when a microbatch is due. Here the script's loop is that function: the protocol makes the
step in a thread of its own, and hands each batch over to the script, which hands back its loss. Right before the
update, when the sums are final, that thread waits for the script's call of :meth:`ExplicitLoop.commit`: what the script
sets before acts in this step. The two threads take turns, so nothing happens at the same time.

Failures it assumes: whatever ends the step in its thread is raised in the script's.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_ft.data import generators
from megatron_ft.errors import ConfigError, EngineError
from megatron_ft.run.engines.port import StepResult

_BEGUN, _BATCH, _UPDATE, _RESULT, _ERROR = "begun", "batch", "update", "result", "error"


class ExplicitLoop:
    """The two sides of a loop. ``loss_fn`` is the engine's."""

    def __init__(self) -> None:
        self._to_script: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._to_step: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._next: tuple[str, Any] | None = None
        self._due = self._in_loop = False

    @property
    def within_step(self) -> bool:
        """True from the beginning of a loop over the microbatches of a step until it is committed."""
        return self._next is not None

    def loss_fn(self, model: torch.nn.Module, batch: Any) -> Any:
        """In the step's thread: hand over a batch, and return its loss."""
        self._to_script.put((_BATCH, batch))
        # no limit: the script and the step take turns; as long as a microbatch takes, of which the agents judge
        answer = self._to_step.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def await_commit(self) -> None:
        """In the step's thread, before the update: wait until the script commits the step."""
        self._to_script.put((_UPDATE, None))
        # no limit: the script and the step take turns; as long as a microbatch takes, of which the agents judge
        self._to_step.get()

    def microbatches(self, step: Callable[[], StepResult]) -> Iterator[Any]:
        """Make a step up to its update, and yield the batch of each microbatch that is due. Raises ``ConfigError`` for
        a loop that does not answer each with :meth:`backward`, a step that is not committed, and whatever ends the
        step."""
        if self._next is not None:
            raise ConfigError(
                "session.microbatches again in the same step: call session.commit() after the loop over them"
            )
        self._next = (_BEGUN, None)
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        threading.Thread(target=self._make, args=(step, device), name="step", daemon=True).start()
        # no limit: the script and the step take turns; as long as a microbatch takes, of which the agents judge
        self._next = self._to_script.get()
        while self._next[0] == _BATCH:
            self._due = self._in_loop = True
            generators.seed_again()  # the script may have drawn after the microbatch before
            try:
                yield self._next[1]
            finally:
                self._in_loop = False
            if self._due:
                self._to_step.put(EngineError("the script has not answered a microbatch"))
                raise ConfigError("session.microbatches: call session.backward(loss) once for each microbatch")
        generators.seed_again()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._next is not None and self._next[0] == _ERROR:
            raise self._next[1]

    def _make(self, step: Callable[[], StepResult], device: int | None) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # that of the script's thread
        try:
            self._to_script.put((_RESULT, step()))
        except BaseException as error:  # raised again in the script's thread
            self._to_script.put((_ERROR, error))

    def backward(self, answer: Any) -> None:
        """Hand back the loss of the microbatch, and wait until its backward pass is done and the next one is due."""
        if not self._due:
            raise ConfigError(
                "session.backward outside of a loop over session.microbatches, or twice in one turn of it"
            )
        self._due = False
        self._to_step.put(answer)
        # no limit: the script and the step take turns; as long as a microbatch takes, of which the agents judge
        self._next = self._to_script.get()

    def commit(self) -> StepResult:
        """Let the step be updated, and return its result. Raises ``ConfigError`` before all its microbatches were asked
        for, and whatever ends the step."""
        if self._next is None or self._next[0] == _BATCH or self._in_loop:
            raise ConfigError(
                "session.commit before the loop over session.microbatches has ended; call it once, after it"
            )
        if self._next[0] == _UPDATE:
            self._to_step.put(None)
            # no limit: the script and the step take turns; as long as a microbatch takes, of which the agents judge
            self._next = self._to_script.get()
        self._raise_error()
        (_, result), self._next = self._next, None
        return result
