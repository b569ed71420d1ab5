"""Saving as a group's leader sees it: it answers every order at its boundary, and gives them while its group is the lowest.

Who gave an order waits for the receipts in a thread beside training, makes them a checkpoint (the manifest, last of all) and
deletes what is too old. Between two boundaries nothing of this is looked at, and at a boundary where nothing is due it costs
one comparison.

Failures it assumes: any writer, or who gave the order, is lost, late or slow; the store is away; the disk is full. The
attempt is dropped then, said and recorded, and what it has written is deleted; another one follows. Training never waits.

The last save of a job that was told to stop is the one after which nobody goes on. Whoever hears of it too late is in the
next step by then, and waits there for those that stand: so it ends the epoch. All go on with that step, and another save
is the last. Nobody leaves before every group stands.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from megatron_ft import config as config_module
from megatron_ft.config import RunConfig
from megatron_ft.core import detector, saving
from megatron_ft.core.saving import Saves, Stops
from megatron_ft.core.state import GroupState
from megatron_ft.errors import CheckpointError, RunStopped
from megatron_ft.runtime import checkpoint, resume
from megatron_ft.runtime.agreement import Agreement
from megatron_ft.runtime.crew import Crew
from megatron_ft.runtime.history import History
from megatron_ft.runtime.inner import Lost
from megatron_ft.runtime.rank import Rank
from megatron_ft.runtime.saving import saved_key
from megatron_ft.types import View

_NEVER = float("inf")
_LOOK_S = (0.01, 0.5)
"""How soon receipts are looked for again: at first, and at most."""
_POLL_S = 0.02
_PATIENCE_S = 1800.0
"""A save that takes longer, or half as long as others wait for this group at the end, is given up: a file system that hangs
must not keep those that work from being used."""
_TRIES_AT_END = 3
STOPPED = "stopped"
"""The key under which the whole job hears that it ends, and why."""


def standing(attempt: str) -> str:
    """The collection of groups that do not go on after that save, the last one."""
    return f"stands/{attempt}"


class _Attempt:
    """One that this rank conducts. The training thread writes ``meta`` and ``dropped``, the other thread reads them."""

    def __init__(self, order: Saves, groups: int, former: Saves | None) -> None:
        self.order, self.groups, self.former = order, groups, former
        self.meta: dict[str, Any] | None = None
        self.dropped = ""
        self.late = self.stuck = False
        self.blamed: set[int] = set()


class Checkpoints:
    """One leader's. All but :meth:`hear` is the training thread's."""

    def __init__(self, rank: Rank, crew: Crew, config: RunConfig, agreement: Agreement, history: History) -> None:
        self._rank, self._crew, self._config, self._history = rank, crew, config, history
        self._agreement, self._own = agreement, agreement.clone()
        self._settings = config.fault_tolerance.checkpoint
        self._directory = Path(self._settings.directory)
        self.on = bool(self._settings.directory)
        self._wake, self._news = _NEVER, self.on
        self._patience_s = min(_PATIENCE_S, config.fault_tolerance.detector.collective_timeout_s / 2)
        self._began = self._last = time.monotonic()
        self._since = 0
        period_s = self._settings.period_s
        self._rhythm = saving.Rhythm(setting=None if period_s == config_module.AUTO else period_s)
        self._order: Saves | None = None
        self._former: Saves | None = None
        self._heard = Saves(-1, -1, "", (), -1)
        self._attempt: _Attempt | None = None
        self._tries, self._tries_at_end, self._passed = 0, 0, -1
        self._avoid: set[int] = set()
        self._saved_step = -1
        self._told: set[int] = set()
        self._why = ""
        self._background = checkpoint.Saver()
        self._lock: checkpoint.Lock | None = None

    # --- hearing ------------------------------------------------------------------------------------------------------

    def hear(self, word: Saves | Stops) -> None:
        """Watcher thread."""
        if not self.on:
            return
        if isinstance(word, Stops):
            self._told |= set(word.groups)
            self._why = self._why or word.why
        elif word.attempt != self._heard.attempt and (word.epoch, word.at) >= (self._heard.epoch, self._heard.at):
            self._heard, self._last = word, time.monotonic()
            self._order = self._former = word
            if word.last and word.at <= self._passed:  # after the order: the boundary looks in the other direction
                self._too_late(word)
        self._news = True

    def _too_late(self, order: Saves) -> None:
        """The others stand at that boundary, or will, and this group does not: they have to go on with the step."""
        why = f"it did not hear in time that all were to stop after step {order.at - 1}"
        self._rank.saving.tell(detector.Reset(order.epoch, self._rank.group, why, order.at - 1))

    def begin(self, view: View, origin: resume.Origin | None) -> None:
        """This group has its seat; ``origin``: what the run goes on from."""
        self._since, self._began = view.epoch, time.monotonic()
        self._last = self._began
        if origin is not None:
            self._saved_step = origin.step
            self._rhythm = self._rhythm.resumed(origin.meta["job"])

    def adopted(self, view: View) -> None:
        """Another view."""
        if not self.on:
            return
        self._news = True
        self._told |= saving.told_too(self._told, view)
        attempt = self._attempt
        if attempt is not None and (lost := saving.lost_writers(attempt.order, view)):
            attempt.dropped = f"groups {' '.join(map(str, lost))} were lost before they had written their parts"

    # --- at a boundary ------------------------------------------------------------------------------------------------

    def boundary(self, state: GroupState, step_s: float) -> None:
        """A step is about to begin, or there is none any more. Raises ``RunStopped`` when the job was told to stop."""
        if self._news or time.monotonic() >= self._wake:
            self._news = False
            self._wake = self._look(state, step_s)
        if not state.finished:  # then it is looked at again and again
            self._passed = state.step
        if self._order is not None and self._order.last and self._order.at <= state.step:  # heard in this moment
            self._wake = self._look(state, step_s)

    def _look(self, state: GroupState, step_s: float) -> float:
        """Do what there is to do; when to look again."""
        self._settle()
        if self._order is not None:
            self._obey(self._order, state)
        if self._order is not None:
            return 0.0
        now = time.monotonic()
        if self._attempt is not None:
            return now + _POLL_S
        if self._rank.group != min(state.view.live) or state.finished:
            return _NEVER
        if not state.synced or state.following:
            return 0.0
        due = self._last + self._rhythm.wait_s(now - self._began, step_s)
        stops = bool(self._told) and saving.stopping(self._told, state.view)
        if now < due and not stops:
            return due
        at = state.step + self._rhythm.margin
        if at > state.job.steps:  # the last step is so near that the save after it is the next one
            return _NEVER
        self._ask(state, at, stops)
        return 0.0

    def _obey(self, order: Saves, state: GroupState) -> None:
        has_state = state.synced and not state.following
        why = saving.answer(order, self._rank.group, state.step, state.view, has_state, self._since)
        if why is None:
            return
        if self._order is order:  # else the watcher thread has heard the next one meanwhile
            self._order = None
        mine = self._attempt is not None and self._attempt.order == order
        if mine and why:
            self._attempt.dropped = why
        elif mine:
            self._history.write()  # no checkpoint may be of a step that the record does not have
            self._attempt.meta = self._meta(state, order)
        if order.part_of(self._rank.group) is not None:
            if not why:
                self._crew.save(order)
            elif order.epoch >= self._since:
                self._rank.saving.decline(order, why, late=order.at < state.step)
        if order.last and not why:
            self._stop(order, state, mine)
        elif order.last and order.epoch == state.view.epoch:
            self._too_late(order)

    def _ask(self, state: GroupState, at: int, last: bool = False) -> None:
        view, me = state.view, self._rank.group
        self._tries += 1
        attempt = f"{self._agreement.run_id}.e{view.epoch}.{me}.{self._tries}"
        writers = saving.writers(view.live, self._domains(), self._avoid)
        order = Saves(at, view.epoch, attempt, writers, me, last)
        former = self._former if self._former is not None and self._former.by not in view.live else None
        self._order, self._heard, self._last = order, order, time.monotonic()
        self._attempt = _Attempt(order, len(view.live), former)
        refused = self._background.start(f"step {at}", lambda attempt=self._attempt: self._conduct(attempt))
        if refused:
            self._failed(refused)

    def _domains(self) -> dict[int, Any]:
        domains = self._config.fault_tolerance.failure_domains
        return {} if domains == config_module.AUTO else dict(enumerate(domains))

    def _meta(self, state: GroupState, order: Saves) -> dict[str, Any]:
        job = self._rhythm.to_json(time.monotonic() - self._began, planned=order.last)
        return resume.meta(self._config, state.job.steps, self._rank.result, state.speeds.to_json(), job)

    def _settle(self) -> None:
        """How the attempt ended that this rank conducts."""
        done = self._background.poll()
        if done is None:
            return
        if done.error is not None:
            self._failed(done.error)
            return
        attempt, self._attempt = self._attempt, None
        order, self._saved_step, self._avoid = attempt.order, attempt.order.at, set()
        self._rhythm = self._rhythm.saved(self._rank.saving.cost_s, done.took_s)
        made = {"step": order.at, **done.value, "parts": len(order.writers), "writers": list(order.writers)}
        self._history.note("checkpoint", seconds=round(done.took_s, 6), blocked_s=round(self._rank.saving.cost_s, 6), **made)
        print(f"megatron_ft: step {order.at} is saved in {made['path']}", flush=True)

    def _failed(self, why: str) -> None:
        attempt, self._attempt = self._attempt, None
        self._rhythm, self._avoid = self._rhythm.lost(attempt.late), attempt.blamed
        self._tries_at_end += _TRIES_AT_END * attempt.stuck  # the end does not wait so long again
        if self._order == attempt.order:
            self._order = None
        self._history.note("checkpoint_failed", step=attempt.order.at, reason=why)
        print(f"megatron_ft: step {attempt.order.at} is not saved: {why}", flush=True)

    # --- the end ------------------------------------------------------------------------------------------------------

    def at_end(self, state: GroupState) -> bool:
        """As the lowest group, with all steps done: save that, unless it is. True: there is nothing to wait for any more."""
        if not self.on or self._saved_step == state.step or self._tries_at_end > _TRIES_AT_END:
            return True
        if self._attempt is None:
            self._tries_at_end += 1
            if self._tries_at_end <= _TRIES_AT_END:
                self._ask(state, state.step)
                self._news = True
        return False

    def _stop(self, order: Saves, state: GroupState, mine: bool) -> None:
        """The whole job was told to stop: wait until its last checkpoint is there, or cannot be. Returns when the epoch ends
        first: the job goes on then, and stops a little later."""
        self._rank.pulse.enter("waiting")
        self._agreement.stands(standing(order.attempt))
        deadline, (pause, longest) = time.monotonic() + self._patience_s, _LOOK_S
        reason = None
        while reason is None:
            if self._rank.lost_because:
                raise Lost(self._rank.lost_because)
            # Before the look: who stops has said so before it ends.
            over = self._rank.concerned(state.view, order.at)
            if not mine:
                reason = self._agreement.get(STOPPED)
            elif self._is_made() and (self._all_stand(order, state.view) or time.monotonic() > deadline):
                reason = self._why
                self._agreement.say(STOPPED, reason)
                self._history.write()
            if reason is None and over:  # if all parts come to be written it is a checkpoint like any other
                print(f"megatron_ft: group {self._rank.group}: step {order.at} is made before the job ends", flush=True)
                return
            time.sleep(pause)
            pause = min(2 * pause, longest)
        self._crew.stop(reason, False)
        self.close()
        raise RunStopped(reason)

    def _is_made(self) -> bool:
        """Whether what this rank conducts has come to its end, whichever."""
        self._settle()
        return self._attempt is None

    def _all_stand(self, order: Saves, view: View) -> bool:
        return self._agreement.standing(standing(order.attempt)) >= set(view.live)

    def close(self) -> None:
        """The run has ended: the next job may have the directory."""
        if self._lock is not None:
            self._lock.release()

    # --- the thread beside training -----------------------------------------------------------------------------------

    def _conduct(self, attempt: _Attempt) -> dict[str, Any]:
        """From the order to the checkpoint. Raises ``CheckpointError``."""
        order = attempt.order
        self._own.announce(order)
        self._discard_former(attempt.former)
        try:
            receipts = self._await(attempt)
            self._hold()
            made = checkpoint.complete(
                self._directory,
                order.at,
                order.attempt,
                receipts,
                run_id=self._agreement.run_id,
                groups=attempt.groups,
                ranks_per_group=self._config.ranks_per_group,
                meta=attempt.meta,
            )
        except CheckpointError:
            checkpoint.discard(self._directory, order.at, order.attempt)
            raise
        try:
            checkpoint.prune(self._directory, self._settings.keep)
        except CheckpointError as error:  # what was saved is saved
            print(f"megatron_ft: {error}", flush=True)
        return {"path": str(made), "bytes": sum(f["bytes"] for receipt in receipts for f in receipt["files"].values())}

    def _discard_former(self, former: Saves | None) -> None:
        """What the attempt of a lost leader has left; it may have come to its end all the same."""
        if former is None:
            return
        for found in checkpoint.find(self._directory):
            if found.unfinished and found.path.endswith(former.attempt):
                checkpoint.discard(self._directory, former.at, former.attempt)

    def _await(self, attempt: _Attempt) -> list[dict[str, Any]]:
        """All receipts; once they are there, it does not matter any more who is lost."""
        order, receipts = attempt.order, {}
        missing = [(part, p) for part in range(len(order.writers)) for p in range(self._config.ranks_per_group)]
        deadline, (pause, longest) = time.monotonic() + self._patience_s, _LOOK_S
        while True:
            dropped = attempt.dropped  # before the look: what was said by then is seen
            for place in missing:
                said = self._own.get(saved_key(*place))
                if said is not None and (said["step"], said["attempt"]) == (order.at, order.attempt):
                    self._refuse_errors(attempt, place, said)
                    receipts[place] = said
            missing = [place for place in missing if place not in receipts]
            if not missing and attempt.meta is not None:
                return list(receipts.values())
            if dropped:
                raise CheckpointError(dropped)
            if time.monotonic() > deadline:
                attempt.blamed, attempt.stuck = {order.writers[part] for part, _ in missing}, True
                names = ", ".join(f"position {p} of group {order.writers[part]}" for part, p in missing)
                raise CheckpointError(f"not written within {self._patience_s:g} s by {names}; does that file system hang?")
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _refuse_errors(self, attempt: _Attempt, place: tuple[int, int], said: dict[str, Any]) -> None:
        if "error" in said:
            group = attempt.order.writers[place[0]]
            attempt.late, attempt.blamed = said.get("late", False), {group}
            raise CheckpointError(f"group {group}: {said['error']}")

    def _hold(self) -> None:
        """The directory is this run's, as far as its lock tells: another job may have been given it meanwhile."""
        try:
            if self._lock is not None:
                self._lock.check()
                return
        except CheckpointError:
            self._lock.release()  # another leader of this run had it, or another run: that shows now
            self._lock = None
        self._lock = checkpoint.lock(self._directory, self._agreement.run_id)
