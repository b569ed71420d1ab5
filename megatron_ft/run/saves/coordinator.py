"""The leader's side of saving: it answers every order at its boundary, and gives orders while its group is the lowest.

The group that gave an order conducts the attempt in a thread beside training (``run.saves.conductor``).
Between two boundaries none of this runs, and a boundary where nothing is due costs one comparison.

Failures it assumes: any writer, or the group that gave the order, is lost, late or slow; the store is away; the disk is
full. The attempt is then dropped, logged and recorded, and its files are deleted; another one follows. Training never
waits.

No group goes on after the last save of a job that was told to stop. A group that receives the order too late is in the
next step by then, and waits there for those that stand, so it ends the epoch. All go on with that step, and another
save is the last. No group leaves before every group stands.
"""

from __future__ import annotations

import logging
import time

from megatron_ft import codec
from megatron_ft.config import rank_env
from megatron_ft.config import schema as config_module
from megatron_ft.config.schema import RunConfig
from megatron_ft.core.lifecycle import checkpoint_protocol
from megatron_ft.core.lifecycle.checkpoint_protocol import Saves, Stops
from megatron_ft.core.protocol import signals
from megatron_ft.core.protocol.state import GroupState
from megatron_ft.errors import RunStopped
from megatron_ft.run import orders
from megatron_ft.run.checkpoint import restore
from megatron_ft.run.collectives.intra_group import Lost
from megatron_ft.run.group_executor import GroupExecutor
from megatron_ft.run.saves.conductor import LOOK_S, Attempt, Conductor
from megatron_ft.types import View, given

_log = logging.getLogger(__name__)

_NEVER = float("inf")
_POLL_S = 0.02
_TRIES_AT_END = 3
STOPPED = "stopped"
"""The key under which the whole job is told that it ends, and why."""


class CheckpointCoordinator:
    """One leader's checkpoints. Only the training thread calls its methods, except for :meth:`on_signal`.

    Large because an order, the attempt that follows it and what was heard of both are read together at each boundary.
    """

    def __init__(self, executor: GroupExecutor, config: RunConfig) -> None:
        self._executor, self._config = executor, config
        self._rank = rank = executor.rank
        self._agreement, self._history, self._conductor = (
            rank.agreement,
            rank.history,
            Conductor(rank.agreement, config),
        )
        settings = config.fault_tolerance.checkpoint
        self.on = bool(settings.directory)
        self._wake, self._news = _NEVER, self.on
        self._began = self._last = time.monotonic()
        self._since = 0
        period_s = None if settings.period_s == config_module.AUTO else settings.period_s
        self._rhythm = checkpoint_protocol.CheckpointSchedule(setting=period_s)
        self._order: Saves | None = None
        self._heard = Saves(-1, -1, "", (), -1)
        self._attempt: Attempt | None = None
        self._tries, self._tries_at_end, self._passed = 0, 0, -1
        self._avoid: set[int] = set()
        self._asks_all = False
        self._saved_step, self._stuck = -1, False
        self._told: set[int] = set()
        self._why = ""

    # --- verdicts -----------------------------------------------------------------------------------------------------

    def on_signal(self, word: Saves | Stops) -> None:
        """Watcher thread: take in an order to save or to stop."""
        if not self.on:
            return
        if isinstance(word, Stops):
            self._told |= set(word.groups)
            self._why = self._why or word.why
        elif word.attempt != self._heard.attempt and (word.epoch, word.at) >= (self._heard.epoch, self._heard.at):
            self._heard, self._order, self._last = word, word, time.monotonic()
            if word.last and word.at <= self._passed:  # after setting the order: the boundary reads in reverse order
                self._too_late(word)
        self._news = True

    def _too_late(self, order: Saves) -> None:
        """End the epoch: the others stand at that boundary without this group, and have to go on with the step."""
        why = f"it did not hear in time that all were to stop after step {order.at - 1}"
        self._executor.local.saving.tell(signals.EpochAborted(order.epoch, why, order.at - 1, self._rank.group))

    def begin(self, view: View, origin: restore.Origin | None) -> None:
        """Begin with this group's seat; ``origin``: the checkpoint from which the run goes on."""
        self._since, self._began = view.epoch, time.monotonic()
        self._last = self._began
        if origin is not None:
            self._saved_step = origin.step
            self._rhythm = self._rhythm.resumed(origin.meta["job"])

    def adopted(self, view: View) -> None:
        """Take in another view."""
        if not self.on:
            return
        self._news = True
        self._told |= checkpoint_protocol.told_too(self._told, view)
        attempt = self._attempt
        if attempt is not None and (lost := checkpoint_protocol.lost_voices(attempt.order, view)):
            attempt.dropped = f"groups {' '.join(map(str, lost))} were lost before they had written their parts"

    # --- at a boundary ------------------------------------------------------------------------------------------------

    def boundary(self, state: GroupState, step_s: float) -> None:
        """Act before a step begins, or after the last one. Raises ``RunStopped`` when the job was told to stop."""
        if self._news or time.monotonic() >= self._wake:
            self._news = False
            self._wake = self._poll(state, step_s)
        if not state.finished:  # after the last step this is called repeatedly
            self._passed = state.step
        if self._order is not None and self._order.last and self._order.at <= state.step:  # the order has just arrived
            self._wake = self._poll(state, step_s)

    def _poll(self, state: GroupState, step_s: float) -> float:
        """Take all actions that are due. Return the time of the next look."""
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
        if not state.synced or state.following or self._executor.local.guard.awaits_view(state.view):
            return 0.0
        due = self._last + self._rhythm.wait_s(now - self._began, step_s)
        stops = bool(self._told) and checkpoint_protocol.stopping(self._told, state.view)
        if now < due and not stops:
            return due
        at = state.step + self._rhythm.margin
        if at > state.job.steps:  # the last step is so near that the save after it is the next one
            return _NEVER
        self._ask(state, at, stops)
        return 0.0

    def _obey(self, order: Saves, state: GroupState) -> None:
        has_state = state.synced and not state.following
        why = checkpoint_protocol.answer(order, self._rank.group, state.step, state.view, has_state, self._since)
        if why is None:
            return
        if self._order is order:  # otherwise the watcher thread has received the next one meanwhile
            self._order = None
        attempt = self._attempt if self._attempt is not None and self._attempt.order == order else None
        if attempt is not None and why:
            attempt.dropped = why
        elif attempt is not None:
            self._history.write()  # no checkpoint may have a step that the record lacks
            job = self._rhythm.to_json(time.monotonic() - self._began, planned=order.last)
            result, identity = given(self._executor.local.state.result), self._executor.local.identities.agreed
            speeds = codec.encode(state.speeds)
            attempt.meta = restore.meta(self._config, state.job.steps, result, speeds, job, identity)
        if self._rank.group in order.voices:
            if not why:
                self._executor.carry_out(orders.Save(order))
            elif order.epoch >= self._since:
                self._executor.local.saving.decline(order, why, late=order.at < state.step)
        if order.last and not why:
            self._stop(order, state, attempt is not None)
        elif order.last and order.epoch == state.view.epoch:
            self._too_late(order)

    def _ask(self, state: GroupState, at: int, last: bool = False) -> None:
        view, me = state.view, self._rank.group
        self._tries += 1
        attempt = f"{self._agreement.run_id}.e{view.epoch}.{me}.{self._tries}"
        domains = self._config.fault_tolerance.failure_domains
        places = {} if domains == config_module.AUTO else dict(enumerate(domains))
        writers = checkpoint_protocol.writers(view.live, places, self._avoid)
        witnesses = checkpoint_protocol.witnesses(view.live, writers, self._asks_all)
        order = Saves(at, view.epoch, attempt, writers, me, last, witnesses)
        former = self._heard if self._heard.attempt and self._heard.by not in view.live else None
        self._order, self._heard, self._last = order, order, time.monotonic()
        self._attempt = Attempt(order, view, former)
        refused = self._conductor.start(self._attempt)
        if refused:
            self._failed(refused)

    def _settle(self) -> None:
        """Take in the outcome of the attempt that this rank conducts."""
        done = self._conductor.saver.poll()
        if done is None:
            return
        if done.error is not None:
            self._failed(done.error)
            return
        attempt, self._attempt = given(self._attempt), None
        order, self._saved_step, self._avoid = attempt.order, attempt.order.at, set()
        self._rhythm = self._rhythm.saved(self._executor.local.saving.cost_s, done.took_s)
        made = {"step": order.at, **done.value, "parts": len(order.writers), "writers": list(order.writers)}
        self._history.note(
            "checkpoint", seconds=round(done.took_s, 6), blocked_s=round(self._executor.local.saving.cost_s, 6), **made
        )
        self._log_beside(f"step {order.at} is saved in {made['path']}")

    def _failed(self, why: str) -> None:
        attempt, self._attempt = given(self._attempt), None
        self._rhythm, self._avoid = self._rhythm.lost(attempt.late), attempt.blamed
        self._stuck |= attempt.stuck
        self._tries_at_end += _TRIES_AT_END * attempt.stuck  # the end does not wait that long again
        if self._order == attempt.order:
            self._order = None
        if attempt.states:
            when = f"at the beginning of step {attempt.order.at}"
            self._executor.local.guard.accuse(when, attempt.order.at, attempt.view, attempt.states)
            self._asks_all = attempt.states.keys() != set(attempt.view.live)
        self._history.note("checkpoint_failed", step=attempt.order.at, reason=why)
        self._log_beside(f"step {attempt.order.at} is not saved: {why}")

    def _log_beside(self, what: str) -> None:
        """Log what the launcher reads in the record and shows itself, if there is one."""
        if not rank_env.is_launched():
            _log.info(what)

    # --- the end ------------------------------------------------------------------------------------------------------

    def at_end(self, state: GroupState) -> bool:
        """As the lowest group, after all steps: save, unless it is done. Return True if nothing is left to wait for."""
        if not self.on or self._saved_step == state.step or self._tries_at_end > _TRIES_AT_END:
            return True
        if self._attempt is None and not self._executor.local.guard.awaits_view(state.view):
            self._tries_at_end += 1
            if self._tries_at_end <= _TRIES_AT_END:
                self._ask(state, state.step)
                self._news = True
        return False

    def newest(self, step: int) -> dict[str, int | None]:
        """Return the field ``saved`` of the run's ``end`` line: the step of the newest complete checkpoint, None when there
        is none. Empty in a run without checkpoints. ``step``: the number of steps of the run."""
        if not self.on:
            return {}
        newest = self._saved_step
        if newest != step and not self._stuck:  # a leader before this one may have saved later
            newest = max(newest, self._conductor.newest())
        return {"saved": None if newest < 0 else newest}

    def _stop(self, order: Saves, state: GroupState, mine: bool) -> None:
        """Wait until the last checkpoint of a job that was told to stop is there, or cannot be. Returns when the epoch
        ends first: the job then goes on, and stops a little later."""
        self._rank.progress.enter("waiting")
        stands = f"stands/{order.attempt}"  # the groups that do not go on after this save
        self._agreement.stands(stands)
        deadline, (pause, longest) = time.monotonic() + self._conductor.patience_s, LOOK_S
        reason = None
        # no limit: the attempt to save has a limit, the end of the epoch ends it, and agents kill ranks 25 s after a
        # stop
        while reason is None:
            if self._rank.lost_because:
                raise Lost(self._rank.lost_because)
            # Before the look: a group that stops has reported it before it ends.
            over = self._rank.link.concerned(state.view, order.at)
            if not mine:
                reason = self._agreement.get(STOPPED)
            elif self._is_made() and (
                self._agreement.standing(stands) >= set(state.view.live) or time.monotonic() > deadline
            ):
                reason = self._why
                self._agreement.put(STOPPED, reason)
                self._history.write()
            if reason is None and over:  # if all parts come to be written it is an ordinary checkpoint
                _log.info(f"group {self._rank.group}: step {order.at} is made before the job ends")
                return
            time.sleep(pause)
            pause = min(2 * pause, longest)
        self._executor.carry_out(orders.Stop(reason))
        self.close()
        raise RunStopped(reason)

    def _is_made(self) -> bool:
        """Return True if the attempt that this rank conducts has ended, successfully or not."""
        self._settle()
        return self._attempt is None

    def close(self) -> None:
        """Release the directory for the next job: the run has ended."""
        self._conductor.close()
