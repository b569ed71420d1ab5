"""Where a run stands, and what happened in it in words, from the lines of its record as they come."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from megatron_ft.record.run_state import RunState, cut_off, steps_made
from megatron_ft.record.words import happened
from megatron_ft.types import host_name, place_name, rank_name

Event = Mapping[str, Any]


class Progress:
    """Puts the lines of a record in words, in their order; ``state`` is what they say of the run."""

    def __init__(self, groups: int) -> None:
        self.state = RunState(groups)

    def line(self, lives: bool = True) -> str:
        """Return step, loss, speed, remaining time, live groups and goodput in one line.

        ``lives``: False for a run of which no process is left: it has neither a remaining time nor live groups.
        """
        lives = lives and not self.state.over
        parts = [
            f"step {self.state.done}" if self.state.total is None else f"step {self.state.done}/{self.state.total}"
        ]
        if self.state.loss is not None:
            parts.append(f"loss {self.state.loss:.4f}")
        if self.state.step_s is not None:
            parts.append(f"{self.state.step_s:.3g} s/step")
        if self.state.tokens_s is not None:
            parts.append(f"{self.state.tokens_s:,.0f} tokens/s")
        if self.state.eta_s is not None and lives:
            parts.append(f"ETA {timedelta(seconds=round(self.state.eta_s))}")
        if lives:
            parts.append(f"live {len(self.state.live)}/{len(self.state.ever)}")
        if self.state.goodput is not None:
            parts.append(f"goodput {min(self.state.goodput, 1.0):.1%}")
        return "  ".join(parts)

    def take(self, event: Event) -> str | None:
        """Take in a line, and return what it says in words; None for a line about nothing but a step."""
        self.state.take(event)
        told = getattr(self, f"_on_{event['event']}", None)
        return None if told is None else told(event)

    def _on_view(self, event: Event) -> str | None:
        cut = cut_off(event)
        return f"group {' '.join(cut)} lost: {next(iter(cut.values()))}" if cut else None

    def _on_fault(self, event: Event) -> str:
        who = rank_name(event["position"], event["pid"], event["host"], event.get("host_rank"))
        what = happened(event)
        more = f" ({event['detail']})" if event["detail"] not in ("", what) else ""
        return f"group {event['group']} lost: {who} {what}{more}"

    def _on_leave(self, event: Event) -> str:
        return f"group {event['group']} leaves after step {event['after']}: {event['reason']}"

    def _on_recovery(self, event: Event) -> str | None:
        view = self.state.view
        if view is not None and view["epoch"] == event["epoch"] and view["joined"] and not event["patched"]:
            does = "joins" if self.state.added >= set(view["joined"]) else "is back"
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
        if event["group"] not in self.state.ever:
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

    def _on_checkpoint(self, event: Event) -> str:
        megabytes = event["bytes"] / 2**20
        return (
            f"step {event['step']} is saved: {megabytes:.1f} MiB by groups {' '.join(map(str, event['writers']))} in "
            f"{event['seconds']:.2f} s, {event['blocked_s']:.3f} s of them in training's way; in {event['path']}"
        )

    def _on_checkpoint_failed(self, event: Event) -> str:
        return f"step {event['step']} is not saved: {event['reason']}"

    def _on_end(self, event: Event) -> str:
        return f"{steps_made(event)}, loss {event['loss']:.4f}{self._saved_at(event)}"

    def _saved_at(self, event: Event) -> str:
        """Return the part of the last line that says whether the state after the last step is saved."""
        if "saved" not in event:
            return ""
        if event["saved"] == event["step"] + 1:
            return f"; step {event['saved']} is saved in {self.state.saved_in}" if self.state.saved_in else ""
        newest = (
            "there is no checkpoint" if event["saved"] is None else f"the newest checkpoint is of step {event['saved']}"
        )
        return f"; step {event['step'] + 1} is NOT saved, {newest}"

    def _on_not_saved(self, event: Event) -> str:
        return event["reason"]
