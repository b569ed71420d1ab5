"""A script's own loop over the microbatches of a step, in place of a loss function.

The protocol calls a loss function when a microbatch is due. Here the script's loop is that function: the protocol makes the
step in a thread of its own, and hands each batch over to the script, which hands back its loss. The two threads take turns,
so nothing happens at the same time.

Failures it assumes: whatever ends the step in its thread is raised in the script's.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from megatron_ft.engines.port import StepResult
from megatron_ft.errors import ConfigError, EngineError

_BATCH, _RESULT, _ERROR = "batch", "result", "error"


class ExplicitLoop:
    """The two sides of a loop. ``loss_fn`` is the engine's."""

    def __init__(self) -> None:
        self._to_script: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        self._to_step: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._next: tuple[str, Any] | None = None
        self._due = False
        self._result: StepResult | None = None

    def loss_fn(self, model: torch.nn.Module, batch: Any) -> Any:
        """In the step's thread: hand over a batch, and return its loss."""
        self._to_script.put((_BATCH, batch))
        answer = self._to_step.get()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def microbatches(self, step: Callable[[], StepResult]) -> Iterator[Any]:
        """Make a step, and yield the batch of each microbatch that is due. Raises ``ConfigError`` for a loop that does not
        answer each with :meth:`backward`, and whatever ends the step."""
        self._result = None
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        threading.Thread(target=self._make, args=(step, device), name="step", daemon=True).start()
        self._next = self._to_script.get()
        while self._next[0] == _BATCH:
            self._due = True
            yield self._next[1]
            if self._due:
                self._to_step.put(EngineError("the script has not answered a microbatch"))
                raise ConfigError("session.microbatches: call session.backward(loss) once for each microbatch")
        kind, value = self._next
        if kind == _ERROR:
            raise value
        self._result = value

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
        self._next = self._to_script.get()

    def commit(self) -> StepResult:
        """Return the result of the step. Raises ``ConfigError`` before all its microbatches were asked for."""
        result, self._result = self._result, None
        if result is None:
            raise ConfigError(
                "session.commit before the loop over session.microbatches has ended; call it once, after it"
            )
        return result
