"""Describe a ``fault`` line of the record in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def ended(fault: Mapping[str, Any]) -> str:
    """Return how a process ended ("SIGKILL", "exit code 3"), or why it, or its whole group, counts as failed."""
    return fault["signal"] or (fault["detail"] if fault["code"] is None else f"exit code {fault['code']}")


def happened(fault: Mapping[str, Any]) -> str:
    """Return :func:`ended` as a predicate: "ended with SIGKILL", "is stopped ..."."""
    given_up = fault["signal"] is None and fault["code"] is None
    return ended(fault) if given_up else f"ended with {ended(fault)}"
