"""The next pass of each rank of a pipeline in one flush, when the list of microbatches may grow during the flush.

The order is that of ``core.scheduling.pipeline_1f1b``. It depends only on the progress of a stage and on the number of
microbatches, so a stage has to know two more things: the next microbatch, and whether it may be the last one. Both come
from the stage before it, ahead of the activations: ``FORWARD`` with the microbatch and the length of the list as known
there, and ``END`` when the first stage is through. The first stage asks its session before each instruction, so
microbatches that were lost elsewhere join the running flush, and what has not begun may change its order
(``core.scheduling.pipeline_order``): no later stage knows of it yet. When it begins its last microbatch, and the group has
no others in this step (``Work.closes``), the list is closed: each stage may then send its buckets after its last backward
pass, and microbatches that are lost elsewhere need another flush.

Stages never wait in a circle, whenever a stage learns of a longer list: no stage waits before a message is sent
(tensors are sent in the background too). A stage waits for activations only after the message that announces them,
which the stage before sends when it begins to compute them. A gradient comes because the next stage, too, waits only
for messages, for activations that are on their way, and for gradients, which the last stage computes itself.

With tensor parallelism the first rank of a stage decides and tells the other ranks: the arrival time of a message must
not make two of them do different things.

Failures it assumes: a rank that vanishes; ``control`` then raises.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_ft.core.scheduling import pipeline_1f1b
from megatron_ft.core.scheduling.pipeline_1f1b import Progress
from megatron_ft.run.engines.layout import Layout
from megatron_ft.run.engines.port import Control, Listed, Work
from megatron_ft.run.engines.rounds import parse, words

_END, _FORWARD, _BACKWARD = 0, 1, 2
_KINDS = {_FORWARD: "forward", _BACKWARD: "backward"}
_NUMBERS = {kind: number for number, kind in _KINDS.items()}


def peers(layout: Layout) -> tuple[int, ...]:
    """Return the positions with which a rank exchanges messages."""
    if layout.position != layout.head:
        return (layout.head,)
    heads = [layout.head + step * layout.width for step in (-1, 1) if 0 <= layout.stage + step < layout.stages]
    return (*heads, *range(layout.head + 1, layout.head + layout.width))


class Pass(NamedTuple):
    """One pass of a stage: ``kind`` is forward or backward, ``index`` numbers the microbatches of the flush; ``last``: no
    other microbatch follows, so that after this backward pass complete buckets may be sent (``Work.ready``)."""

    kind: str
    index: int  # type: ignore[assignment]  # in place of tuple.index, which is not used
    listed: Listed
    last: bool = False


class Flow:
    """One rank's side of one flush. The caller executes the result of each :meth:`next` before the next call."""

    def __init__(self, layout: Layout, control: Control, work: Work) -> None:
        self._layout, self._control, self._work = layout, control, work
        self._listed: list[Listed] = []
        self._done = Progress()
        self._count, self._ended, self._closed = 0, False, False

    def next(self) -> Pass | None:
        """Return the next pass, or None when the flush is over here and in all earlier stages."""
        layout = self._layout
        if layout.position != layout.head:
            return self._obey()
        found = self._first() if layout.stage == 0 else self._later()
        self._tell_slices(found)
        self._tell_next(found)
        if found is not None:
            forward = found.kind == "forward"
            self._done = Progress(self._done.forwards + forward, self._done.backwards + (not forward))
        return found

    def _first(self) -> Pass | None:
        if self._closed:
            return self._decide()
        begun = self._listed[: self._done.forwards]
        known = {one.microbatch for one in begun}
        self._listed = [*begun, *(one for one in self._work.listed() if one.microbatch not in known)]
        assert len(self._listed) >= self._count, "later stages wait for what is not listed any more"
        self._count = len(self._listed)
        found = self._decide()
        if found is not None and found.kind == "forward" and found.index == self._count - 1:
            self._closed = self._work.closes(self._listed[self._done.backwards :])
            found = found._replace(last=self._closed)
        return found

    def _later(self) -> Pass | None:
        before, layout = self._layout.head - self._layout.width, self._layout
        while not self._ended and (word := self._control.heard(before)) is not None:
            self._on_word(word)
        while not self._ended:
            room = self._done.forwards - self._done.backwards < layout.stages - layout.stage
            waits = room and self._done.forwards == len(self._listed) and self._done.forwards < self._count
            idle = self._done.backwards == len(self._listed)
            if not waits and not idle:
                break
            self._on_word(self._control.receive_words(before))
        return self._decide()

    def _decide(self) -> Pass | None:
        layout = self._layout
        instruction = pipeline_1f1b.next_instruction(layout.stage, layout.stages, self._done, len(self._listed))
        if instruction is None:
            return None
        last = self._closed and instruction.index == len(self._listed) - 1
        return Pass(instruction.kind, instruction.index, self._listed[instruction.index], last)

    def _on_word(self, word: tuple[int, ...]) -> None:
        kind, self._count, closed, *rest = word
        if kind == _END:
            self._ended = True
        else:
            self._listed.append(parse(rest))
            self._closed = bool(closed)

    def _tell_next(self, found: Pass | None) -> None:
        """Send the decision to the head of the next stage."""
        layout = self._layout
        if layout.stage + 1 == layout.stages or (found is not None and found.kind == "backward"):
            return
        said = (_END,) if found is None else (_FORWARD, self._count, found.last, *words(found.listed))
        self._control.send_words(layout.head + layout.width, said)

    def _tell_slices(self, found: Pass | None) -> None:
        said: tuple[int, ...] = (_END,)
        if found is not None:
            said = (_NUMBERS[found.kind], found.index, found.last, *words(found.listed))
        for other in range(self._layout.head + 1, self._layout.head + self._layout.width):
            self._control.send_words(other, said)

    def _obey(self) -> Pass | None:
        kind, index, last, *rest = self._control.receive_words(self._layout.head)
        return None if kind == _END else Pass(_KINDS[kind], index, parse(rest), bool(last))
