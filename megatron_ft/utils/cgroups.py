"""The control groups of this process and all groups around them, of version 1 or 2."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

MOUNTED, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def around(controller: str, mounted: Path = MOUNTED, own: Path = OWN) -> Iterator[tuple[Path, int]]:
    """Yield directory and version of each group that the controller may limit, the innermost first. Directories that are
    not visible here, as in a container, are yielded, too.

    Args:
        controller: ``cpu`` or ``memory``.
        mounted: where the control groups are mounted.
        own: the file that names those of this process.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        place = Path(path.lstrip("/"))
        for group in (place, *place.parents):
            if not controllers:
                yield mounted / group, 2
            elif controller in controllers.split(","):
                yield mounted / controllers / group, 1
