"""Names of torch that it does not document and this package uses. They are looked up before a script's first step."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable

from megatron_ft.errors import ConfigError

TESTED = "2.9 to 2.15"
NAMES = (
    "torch._C._distributed_c10d",
    "torch.distributed.distributed_c10d._world.pg_map",
    "torch.distributed.ProcessGroup._get_backend",
    "torch.nn.modules.batchnorm._NormBase",
    "torch.Tensor._version",
    "torch._foreach_add_",
    "torch._foreach_copy_",
    "torch._foreach_norm",
    "torch._foreach_sub_",
    "torch._foreach_zero_",
)
"""All of them, but those of the debug server, whose absence costs only the flight recorder's lines."""


def check(names: tuple[str, ...] = NAMES) -> None:
    """Raise ``ConfigError`` if this torch lacks one of ``names``."""
    if missing := lacking(names):
        import torch

        raise ConfigError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which megatron_ft uses; "
            f"install a torch with which it was tested: {TESTED}"
        )


def lacking(names: Iterable[str]) -> list[str]:
    """Return those of some dotted names that are neither a module nor an attribute of one. Their packages are installed."""
    return [name for name in names if not _exists(name)]


def _exists(name: str) -> bool:
    """True if a dotted name is a module, or an attribute of one."""
    try:
        pkgutil.resolve_name(name)
    except AttributeError:
        return False
    return True
