"""The collectives that torch's flight recorder has recorded in this process, as ``core.detection.collective_stalls`` needs
them.

torch records every collective, with its sequence number and whether it has ended: NCCL's in one recorder, those of gloo and
all other back ends in another (gloo records no point-to-point operation).

Failures it assumes: this torch has only one of the recorders, refuses a request, or does not answer in time.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from megatron_ft.core.detection.collective_stalls import Call, unended
from megatron_ft.utils import deadline

_RECORDERS = (("dump_nccl_trace_json", "_dump_nccl_trace_json"), ("fr_trace_json", "_dump_fr_trace_json"))
"""For each recorder, a handler of torch's debug server, and a function of torch's C module. The handler is tried first, as
it releases the GIL. The function holds it meanwhile: 0.4 s for 20000 entries, and for ever if CUDA blocks. With CUDA, torch
2.11 refuses a request of ours, so that only the function is left."""
_HOOKED = ("nccl2", "nccl-lazy", "nccl")
"""Back ends that have recorders of their own from torch 2.15 on, where "nccl" is nccl2 unless the user says otherwise."""
_BEFORE, _AFTER = 8, 24
"""Calls that are kept before and after the oldest that has not ended."""
_PEER = re.compile(r"(\d+)(?:->|<-)(\d+)")


def entries(deadline_s: float = 1.0) -> list[dict[str, Any]]:
    """Return the entries of all recorders, oldest first; empty if none came within ``deadline_s``."""
    return deadline.Call("megatron_ft-recorder", _entries).within(deadline_s).value or []


def _c10d() -> Any:
    """Return torch's C module; its stubs lack the parts that are used here."""
    return torch._C._distributed_c10d


def _entries() -> list[dict[str, Any]]:
    texts = [_ask(handler) or _call(function) for handler, function in _RECORDERS]
    texts += [_call(_RECORDERS[1][1], backend=backend) for backend in _HOOKED]
    found = [entry for text in texts if text is not None for entry in json.loads(text).get("entries", [])]
    return sorted(found, key=lambda entry: entry["time_created_ns"])


def _ask(handler: str) -> str | bytes | None:
    """Return the answer of a handler of torch's debug server; None if there is none."""
    module = _c10d()
    answer: list[str | bytes] = []
    try:
        if handler not in module._get_handler_names():
            return None
        request = type("Request", (module._Request,), {"body": lambda _: b"", "params": lambda _: {}})
        response = type(
            "Response",
            (module._Response,),
            {"set_content": lambda _, content, kind: answer.append(content), "set_status": lambda _, status: None},
        )
        module._get_handler(handler)(request(), response())
    except (AttributeError, RuntimeError, TypeError):  # a torch without that server, or one that refuses the request
        return None
    return answer[0] if answer else None


def _call(function: str, **of: str) -> str | bytes | None:
    """Return what a function of torch's C module has; None if this torch lacks it, or its argument ``of``."""
    dump: Callable[..., str | bytes] | None = getattr(_c10d(), function, None)
    if dump is None:
        return None
    try:
        return dump(includeCollectives=True, onlyActive=False, **of)
    except TypeError:  # that of gloo has no onlyActive in older ones
        return None if of else dump(includeCollectives=True)


def calls(recorded: Iterable[Mapping[str, Any]], members: Mapping[str, Sequence[int]]) -> tuple[Call, ...]:
    """Return the entries of some process groups as calls. ``members``: process group -> ranks of the world.

    Those of this package have no name; in them ranks wait for other groups.
    """
    return tuple(_call_of(entry, members) for entry in recorded if entry["process_group"][0] in members)


def _call_of(entry: Mapping[str, Any], members: Mapping[str, Sequence[int]]) -> Call:
    group, name = entry["process_group"][0], entry["profiling_name"]
    backend, _, operation = name.partition(":")
    peer = None
    if entry["is_p2p"] and (found := _PEER.search(operation)) is not None:
        ranks = members[group]
        number = int(found[2])  # of this rank's peer in the group: both "0->1" and "0<-1" begin with this rank
        peer = ranks[number] if number < len(ranks) else None
    # gloo's entries never become "completed"; a retired one of NCCL's that is not has timed out.
    ended = entry["state"] == "completed" or (entry["retired"] and backend != "nccl")
    number = entry["p2p_seq_id" if entry["is_p2p"] else "collective_seq_id"]
    sizes = str(entry["input_sizes"])
    return Call(group, number, operation.partition(" ")[0] or name, sizes, ended, entry["is_p2p"], peer)


def around(found: Sequence[Call]) -> tuple[Call, ...]:
    """Return the calls before and after the oldest that has not ended, and of the others the newest."""
    pending = unended(found)
    at = next((number for number, call in enumerate(found) if pending and call is pending[0]), len(found))
    return tuple(found[max(0, at - _BEFORE) : at + _AFTER])


def entered(found: Iterable[Call]) -> dict[str, int]:
    """Return the number of the newest collective of each process group."""
    newest: dict[str, int] = {}
    for call in found:
        if not call.p2p:
            newest[call.group] = max(call.number, newest.get(call.group, 0))
    return newest


def lines(found: Iterable[Call], labels: Mapping[str, str], keep: int) -> list[str]:
    """Return the newest ``keep`` calls for people, newest last."""
    return [
        f"{labels.get(call.group, call.group)} {call.name} #{call.number} {call.sizes} "
        f"{'ended' if call.ended else 'not ended'}"
        for call in deque(found, maxlen=keep)
    ]
