"""The chaos campaign: ``python -m tests.chaos --runs 60 --seed 0 --out FILE.json``; ``--seed S`` alone plays one run.

Every seed is one run of real processes, in which some are killed, frozen or slowed down. A run that breaks a promise is told
with its schedule and the command that plays it again, and its directory is kept. Exit code 0: every promise kept.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from tests.chaos import campaign
from tests.chaos.plan import OTHERS
from tests.chaos.play import ENGINES


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description="Play runs with faults, and judge them.")
    parser.add_argument("--runs", type=int, default=1, help="how many; their seeds follow on each other")
    parser.add_argument("--seed", type=int, default=0, help="of the first run")
    parser.add_argument("--policy", choices=OTHERS, help="play the runs with this policy (default: stacked_quota)")
    parser.add_argument(
        "--exact",
        action="store_true",
        help="exact reduction: bits are compared, and the seeds take turns with policies",
    )
    parser.add_argument("--engine", choices=ENGINES, help="an engine whose ranks compute together (default: plain)")
    parser.add_argument("--out", type=Path, help="write the results there, as JSON")
    parser.add_argument(
        "--dir", type=Path, help="work there and keep everything; else what kept its promises is deleted"
    )
    parser.add_argument("--dry-run", action="store_true", help="show the schedules, start nothing")
    options = parser.parse_args(arguments)
    seeds = range(options.seed, options.seed + options.runs)
    if options.dry_run:
        for seed in seeds:
            print("\n".join(campaign.describe(seed)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # like Ctrl-C: the current run is ended first
    directory = options.dir or Path(tempfile.mkdtemp(prefix="chaos-"))
    results = []
    for seed in seeds:
        how = {"keep": options.dir is not None, "policy": options.policy or "", "exact": options.exact}
        how["engine"] = options.engine or ""
        results.append(campaign.run(seed, directory, **how))
        print("\n".join(campaign.tell(results[-1], directory)), flush=True)
        if options.out:
            summary = campaign.summary(results, "python -m tests.chaos " + " ".join(arguments or sys.argv[1:]))
            options.out.write_text(json.dumps(summary, indent=1) + "\n")
    violated = [result["seed"] for result in results if result["violations"]]
    faults = sum(fault["state"] == "injected" for result in results for fault in result["faults"])
    print(
        f"{len(results)} runs, {faults} faults injected: "
        + (f"VIOLATED by seeds {violated}" if violated else "all kept")
    )
    if not violated and options.dir is None:
        shutil.rmtree(directory)
    return 1 if violated else 0


if __name__ == "__main__":
    sys.exit(main())
