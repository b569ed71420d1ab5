"""A user of the same machine who knows the public parts of the run directory can stop no run and change no decision."""

from __future__ import annotations

import json
import os
import stat
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from megatron_ft.run.injection_points import Breakpoint
from megatron_ft.utils.auth import secret
from tests import support

STOP = {"kind": "Stops", "groups": list(range(support.GROUPS)), "why": "a stranger says so"}


def test_forged_notices_views_reports_and_an_end_change_nothing(tmp_path, data_dir, reference):
    """The forgeries are written while a group is frozen in the step in which it is then killed: the recovery reads all
    of them."""
    run = support.start(tmp_path / "run", data_dir, [Breakpoint(2, 3, "backward")], extra=["--private"])
    pid = support.await_held(run, 2)
    config = json.loads((run.directory / "config.json").read_text())
    host, _, port = config["store_address"].rpartition(":")
    stranger = dist.TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=support.TIMEOUT_S))
    name = config["run_id"]
    last = next(index for index in range(1000) if not stranger.check([f"{name}/notice/{index}"]))
    for key, value in {
        f"notice/{last}": STOP,
        f"notice/{last + 1}": STOP,
        "view/1": {"epoch": 1, "live": [0], "reason": "a stranger says so"},
        "ended": True,
    }.items():
        stranger.set(f"{name}/{key}", json.dumps({"value": value}))
    stranger.append(f"{name}/report/0", "".join(f'{group}\t{{"value": {{}}}}\n' for group in range(support.GROUPS)))
    own = secret.load(run.directory, environ={}).text
    shown = b"".join(Path(f"/proc/{each}/cmdline").read_bytes() for each in (pid, run.process.pid))
    assert own.encode() not in shown
    run.strike(Breakpoint(2, 3, "backward"))
    run.check(reference)
    forged = {line["key"] for line in run.events("forged")}
    assert forged >= {f"notice/{last}", f"notice/{last + 1}", "view/1"}, forged
    assert any(key.startswith("report/0/") for key in forged)
    assert not run.events("leave") and [line["epoch"] for line in run.events("view")] == [0, 1]
    assert stat.S_IMODE(os.stat(run.directory).st_mode) == 0o700
    files = [path for path in run.directory.rglob("*") if path.is_file() and own in path.read_text(errors="replace")]
    assert files == [run.directory / secret.FILE]
