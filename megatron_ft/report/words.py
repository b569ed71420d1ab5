"""What a fault's line in the record says, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def ended(fault: Mapping[str, Any]) -> str:
    """SIGKILL, exit code 3; or why the process, or its whole group, was given up."""
    return fault["signal"] or (fault["detail"] if fault["code"] is None else f"exit code {fault['code']}")


def happened(fault: Mapping[str, Any]) -> str:
    """The same as a predicate: "ended with SIGKILL", "is stopped ..."."""
    given_up = fault["signal"] is None and fault["code"] is None
    return ended(fault) if given_up else f"ended with {ended(fault)}"
