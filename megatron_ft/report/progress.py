"""Where a run stands, and what happened in it in words, from the lines of its record as they come."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

from megatron_ft.report.words import happened
from megatron_ft.types import CUT_OFF, host_name, place_name, rank_name

Event = Mapping[str, Any]
_RECENT = 50
"""Steps whose median is the present time of a step."""


class Progress:
    """Takes in the lines of a record in their order.

    Attributes:
        step: number of steps that are done; ``total``: of the whole run, None while it is not known.
        loss: of the last step, None before the first.
        live: number of groups that are members now; ``members``: of all that ever were.
        failures: number of ranks that have failed.
        ended: the run has made its last step, or was stopped.
    """

    def __init__(self, groups: int) -> None:
        self.step, self.loss = 0, None
        self.total: int | None = None
        self.failures, self.ended = 0, False
        self._live: set[int] = set(range(groups))
        self._ever = set(self._live)
        self._added: set[int] = set()
        self._view: Event = {"epoch": -1}
        self._place = ""
        self._durations: deque[float] = deque(maxlen=_RECENT)
        self._tokens: deque[tuple[int, float]] = deque(maxlen=_RECENT)
        self._began = self._now = 0.0
        self._trained_s = self._stalled_s = 0.0

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def members(self) -> int:
        return len(self._ever)

    @property
    def step_s(self) -> float | None:
        """Median duration of the last steps, in seconds; None before the first."""
        return statistics.median(self._durations) if self._durations else None

    @property
    def tokens_s(self) -> float | None:
        """Tokens per second in the last steps; None if the record has no tokens."""
        tokens, seconds = (sum(each) for each in zip(*self._tokens, strict=True)) if self._tokens else (0, 0.0)
        return tokens / seconds if tokens and seconds else None

    @property
    def eta_s(self) -> float | None:
        """Seconds until the last step at the present speed; None while it is not known."""
        return None if self.total is None or self.step_s is None else (self.total - self.step) * self.step_s

    @property
    def goodput(self) -> float | None:
        """Share of the time since the first step began in which steps were made without waiting for a recovery; None
        before a step is done. Evaluation and saving between steps do not count as training."""
        elapsed = self._now - self._began
        return max(0.0, self._trained_s - self._stalled_s) / elapsed if self._durations and elapsed > 0 else None

    def line(self) -> str:
        """Return step, loss, speed, remaining time, live groups and goodput in one line."""
        parts = [f"step {self.step}" if self.total is None else f"step {self.step}/{self.total}"]
        if self.loss is not None:
            parts.append(f"loss {self.loss:.4f}")
        if self.step_s is not None:
            parts.append(f"{self.step_s:.3g} s/step")
        if self.tokens_s is not None:
            parts.append(f"{self.tokens_s:,.0f} tokens/s")
        if self.eta_s is not None:
            parts.append(f"ETA {timedelta(seconds=round(self.eta_s))}")
        parts.append(f"live {self.live}/{self.members}")
        if self.goodput is not None:
            parts.append(f"goodput {min(self.goodput, 1.0):.1%}")
        return "  ".join(parts)

    def take(self, event: Event) -> str | None:
        """Take in a line, and return what it says in words; None for a line about nothing but a step."""
        kind, self._now = event["event"], max(self._now, event.get("t", 0.0))
        if kind == "step":
            self._take_step(event)
            return None
        told = getattr(self, f"_on_{kind}", None)
        return None if told is None else told(event)

    def _take_step(self, event: Event) -> None:
        self.step, self.loss = event["step"] + 1, event["loss"]
        seconds = event.get("duration_s", 0.0)
        self._began = self._began or self._now - seconds
        self._durations.append(seconds)
        self._trained_s += seconds
        if "tokens" in event:
            self._tokens.append((event["tokens"], seconds))

    def _on_begin(self, event: Event) -> None:
        self.total = event["steps"]
        self._began = self._began or self._now

    def _on_view(self, event: Event) -> str | None:
        new = set(event["live"])
        self._added = new - self._ever
        self._live, self._view, self._ever = new, event, self._ever | new
        # No agent is left to write a `fault` line of a host that is cut off.
        cut = {group: why for group, why in event["lost"].items() if why.startswith(CUT_OFF)}
        self.failures += len(cut)
        return f"group {' '.join(cut)} lost: {next(iter(cut.values()))}" if cut else None

    def _on_fault(self, event: Event) -> str:
        self.failures += 1
        who = rank_name(event["position"], event["pid"], event["host"], event.get("host_rank"))
        what = happened(event)
        more = f" ({event['detail']})" if event["detail"] not in ("", what) else ""
        return f"group {event['group']} lost: {who} {what}{more}"

    def _on_leave(self, event: Event) -> str:
        return f"group {event['group']} leaves after step {event['after']}: {event['reason']}"

    def _on_recovery(self, event: Event) -> str | None:
        self._stalled_s += event["stall_s"]
        view = self._view
        if view["epoch"] == event["epoch"] and view["joined"] and not event["patched"]:
            does = "joins" if self._added >= set(view["joined"]) else "is back"
            groups = " ".join(map(str, view["joined"]))
            return f"group {groups} {does} in step {event['step']}; the others waited {event['stall_s']:.2f} s"
        by = " ".join(sorted(event["patched_by"], key=int))
        promoted = event.get("promoted", 0)  # records of older versions do not have it
        parts = [f"{promoted} microbatches contributed by groups that stood by"] if promoted else []
        parts += [f"{event['patched']} microbatches taken over by groups {by}"] if event["patched"] else []
        done = ", ".join(parts) or "nothing to patch"
        return f"step {event['step']} goes on: {done}; stalled {event['stall_s']:.2f} s"

    def _on_restart(self, event: Event) -> str:
        pids = " ".join(map(str, event["pids"])) or "none could be started"
        where = place_name(event["host"], event.get("host_rank"))
        how = f"on {where} (incarnation {event['incarnation']}, pid {pids})"
        if event["group"] not in self._ever:
            return f"group {event['group']} is started {how}"
        after = f", {event['after_s']:.1f} s after it was lost" if event["after_s"] > 0.1 else ""
        return f"group {event['group']} is started again {how}{after}"

    def _on_host(self, event: Event) -> str:
        groups = " ".join(map(str, event["groups"]))
        who = host_name(event["host"], event.get("host_rank"))
        if event["what"] == "spare":
            return f"{who} is there as a spare"
        return f"{who} {'takes over' if event['what'] == 'took over' else 'adds'} group {groups}"

    def _on_given_up(self, event: Event) -> str:
        return f"group {event['group']} does not come back: {event['reason']}"

    def _on_divergence(self, event: Event) -> str:
        if "tied" in event:
            return f"step {event['step']}: the groups' states differ, and none is held by most: {event['tied']}"
        what = ", ".join(event["what"]) or "its state"
        return f"step {event['step']}: group {event['group']} differs from the others in {what}, and leaves"

    def _on_stragglers(self, event: Event) -> str:
        if not event["slow"]:
            return f"step {event['step']}: all groups are about as fast again"
        slow = ", ".join(f"group {group} takes {factor:.1f} times as long" for group, factor in event["slow"].items())
        return f"step {event['step']}: {slow} as the others; it gets fewer microbatches"

    def _on_resume(self, event: Event) -> None:
        self.step, self._place = event["step"], event["checkpoint"]

    def _on_checkpoint(self, event: Event) -> str:
        self._place = event["path"]
        megabytes = event["bytes"] / 2**20
        return (
            f"step {event['step']} is saved: {megabytes:.1f} MiB by groups {' '.join(map(str, event['writers']))} in "
            f"{event['seconds']:.2f} s, {event['blocked_s']:.3f} s of them in training's way; in {event['path']}"
        )

    def _on_checkpoint_failed(self, event: Event) -> str:
        return f"step {event['step']} is not saved: {event['reason']}"

    def _on_end(self, event: Event) -> str:
        self.ended = True
        return f"all {event['step'] + 1} steps done, loss {event['loss']:.4f}{self._saved_at(event)}"

    def _saved_at(self, event: Event) -> str:
        """Return the part of the last line that says whether the state after the last step is saved."""
        if "saved" not in event:
            return ""
        if event["saved"] == event["step"] + 1:
            return f"; step {event['saved']} is saved in {self._place}" if self._place else ""
        newest = (
            "there is no checkpoint" if event["saved"] is None else f"the newest checkpoint is of step {event['saved']}"
        )
        return f"; step {event['step'] + 1} is NOT saved, {newest}"

    def _on_not_saved(self, event: Event) -> str:
        return event["reason"]

    def _on_stop(self, event: Event) -> None:
        self.ended = True


def log_of(run_dir: Path, group: int, position: int) -> Path:
    """Return the file of a rank's output."""
    return run_dir / "logs" / f"g{group}.p{position}.log"
