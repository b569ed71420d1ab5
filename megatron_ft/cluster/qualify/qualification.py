"""``megatron-ft qualify``: host 0 leads; every host, host 0 too, carries out orders (``host_part``).

Failures it assumes: a host or process is lost, stopped or hangs at any moment; a check that meets it fails and says so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

import megatron_ft
from megatron_ft import codec
from megatron_ft.cluster.doctor import host_orders
from megatron_ft.cluster.doctor.host_orders import Hub
from megatron_ft.cluster.doctor.meeting import Meeting
from megatron_ft.cluster.qualify import device_seats
from megatron_ft.cluster.qualify.communicator_checks import CommunicatorChecks
from megatron_ft.cluster.qualify.device_seats import Seat
from megatron_ft.cluster.qualify.host_part import HostPart
from megatron_ft.cluster.qualify.outcomes import (
    CHECKS,
    FAILED,
    KINDS,
    Check,
    CheckFailed,
    Found,
    NotHere,
    Qualification,
)
from megatron_ft.cluster.qualify.team import Team, ask
from megatron_ft.cluster.qualify.training_checks import TrainingChecks
from megatron_ft.errors import ConfigError, LaunchError
from megatron_ft.run.collectives import communicator_choice
from megatron_ft.run.collectives.communicator_choice import Offer
from megatron_ft.run.store import listen, serve_on
from megatron_ft.utils import shared_file, terminal

_FACTS_S = 200.0
_END_S = 60.0
ONE = Meeting(1, 0, store=("127.0.0.1", 0), command="qualify")
"""The meeting of a single host with itself."""


def run(options: argparse.Namespace, where: Meeting | None) -> int:
    """Run this host's part. ``where``: the meeting of several hosts. Return the exit code: 0 when nothing failed, 1 when
    something did, 2 when host 0 was lost. Raises ``LaunchError``, ``ConfigError``."""
    if options.groups is not None and options.groups < 2:
        raise ConfigError(f"--groups is {options.groups} and must be 2 or more: a single group has nobody to talk to")
    if options.gpus is not None and options.gpus < 0:
        raise ConfigError(f"--gpus is {options.gpus} and must be 0 (only the CPU) or more")
    if where is not None and where.directory is None:
        raise LaunchError("--directory is missing; several hosts need one that they share, for the training runs")
    if options.json not in (None, "-") and not Path(options.json).absolute().parent.is_dir():
        raise ConfigError(
            f"--json is {options.json}, and there is no directory {Path(options.json).parent}; make it first"
        )
    if options.directory is not None and not options.directory.is_dir():
        raise LaunchError(f"--directory {options.directory} is not a directory on this host; give one that is there")
    for number in (signal.SIGTERM, signal.SIGHUP):  # what was started is ended below
        signal.signal(number, signal.default_int_handler)
    if where is not None:
        # Hosts start whatever host 0 orders, so none takes an order without a secret.
        where = replace(where, command="qualify", secret_by_file=where.secret is None)
    if where is not None and where.rank != 0:
        code, line = host_orders.attend(where, HostPart())
        print(terminal.printable(f"host {where.rank}: {line}"), file=sys.stderr, flush=True)
        return code
    with _hub(where or ONE) as (hub, job), _directory(options.directory, job) as directory:
        lead = _Lead(options, hub, directory, job)
        with Console(stderr=True).status("starting") as status:  # on a terminal only
            lead.qualify(lambda words: status.update(words))
        code, line = lead.found.exit_code, lead.found.verdict()
        hub.end(code, line)
        if code == 0:
            shutil.rmtree(directory, ignore_errors=True)
    _show(options.json, lead)
    if code:
        print(f"the records of the training runs are in {directory}", file=sys.stderr)
    return code


def _show(to: str | None, lead: _Lead) -> None:
    document = json.dumps(lead.document(), indent=1)
    if to == "-":
        print(document)
        return
    if to is not None:
        shared_file.write(Path(to), f"{document}\n", mode=0o666)
    console = terminal.console(markup=False, highlight=False)
    groups = len(lead.seats)
    lead.found.table(f"megatron-ft qualify, {groups} groups").show(console)
    console.print(lead.found.verdict(), soft_wrap=True)


# --- where it happens -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _hub(where: Meeting) -> Iterator[tuple[Hub, str]]:
    """Meet all hosts, this one too. Yields the connections, and a name that no other qualification has.

    Raises ``LaunchError`` if one does not come."""
    with host_orders.gathered(where, HostPart) as hub:
        if absent := [where.name(host) for host in range(where.hosts) if host not in hub.host_records]:
            hub.end(2, f"host 0 has not begun: {', '.join(absent)} did not come")
            raise LaunchError(
                f"{', '.join(absent)} did not connect within {where.patience_s:g} s; start qualify on all hosts at the "
                f"same time, and check them with megatron-ft doctor"
            )
        yield hub, f"{where.job}.{uuid.uuid4().hex[:8]}"


@contextlib.contextmanager
def _directory(parent: Path | None, job: str) -> Iterator[Path]:
    if parent is None:
        made = Path(tempfile.mkdtemp(prefix="megatron-ft-qualify-"))
    else:
        made = parent.resolve() / f"qualify.{job.replace('/', '_')}"
        made.mkdir()
    try:
        yield made
    except KeyboardInterrupt:
        shutil.rmtree(made, ignore_errors=True)
        raise


# --- host 0 -----------------------------------------------------------------------------------------------------------


class _Lead:
    def __init__(self, options: argparse.Namespace, hub: Hub, directory: Path, job: str) -> None:
        self._options, self._hub, self._directory, self._job = options, hub, directory, job
        self._facts: list[dict[str, Any]] = []
        self._began = time.time()
        self.seats: list[Seat] = []
        self.found = Qualification()

    def qualify(self, shows: Callable[[str], None]) -> None:
        """Make all checks. ``shows``: takes a line about the progress."""
        found = self.found
        found.said = lambda check: shows(f"{len(found.checks)} of {len(CHECKS)} checks; {check.name}: {check.outcome}")
        try:
            said = ask(self._hub, dict.fromkeys(self._hub.present, {"do": "facts"}), _FACTS_S)
        except CheckFailed as error:
            found.record(Check("environment.torch", FAILED, str(error)))
            for part in ("environment", *KINDS, "training"):
                found.skip(part, "torch does not work on all hosts (environment.torch)")
            return
        self._facts = [said[host] for host in self._hub.present]
        for facts in self._facts:
            facts["gpus"] = facts["gpus"][: self._options.gpus]
        gpus = [len(facts["gpus"]) for facts in self._facts]
        groups = self._options.groups or device_seats.usual_groups(gpus)
        self.seats, no_nccl = device_seats.seats(groups, self._facts)
        with _store(self._hub.host_records[0]["address"]) as store:
            team = Team(self._hub, self.seats, store)
            self._environment(team)
            CommunicatorChecks("gloo", "cpu", team).run(found)
            if no_nccl:
                found.skip("nccl", no_nccl)
            else:
                CommunicatorChecks("nccl", "cuda", team).run(found)
        with contextlib.suppress(CheckFailed):  # of a host that is lost, which the checks below say
            ask(self._hub, dict.fromkeys(self._hub.present, {"do": "dismiss"}), _END_S)
        device = "cuda" if all(gpus) else "cpu"
        TrainingChecks(self._hub, groups, device, self._directory, self._job, self._options.seed).run(found)

    def _environment(self, team: Team) -> None:
        make = self.found.make
        make("environment.torch", self._torch)
        make("environment.gpus", self._gpus)
        make("environment.nccl", self._nccl)
        make("environment.watchdog", lambda: self._watchdog(team))
        make("environment.communicator", lambda: self._communicator(team))

    def _torch(self) -> Found:
        version = _same(f"torch {facts['torch']}" for facts in self._facts)
        return f"{version} on {len(self._facts)} host{'s' * (len(self._facts) > 1)}", []

    def _gpus(self) -> Found:
        names = [gpu["name"] for facts in self._facts for gpu in facts["gpus"]]
        if not names:
            raise NotHere("no GPU" if self._options.gpus is None else "no GPU takes part (--gpus 0), or there is none")
        return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names)), []

    def _nccl(self) -> Found:
        if not any(facts["gpus"] for facts in self._facts):
            raise NotHere("no GPU")
        version = _same(".".join(map(str, facts["nccl"])) or "none" for facts in self._facts)
        if version == "none":
            raise NotHere("this torch was built without NCCL")
        if any(facts["nccl_settings"].get("NCCL_COMM_BLOCKING") == "1" for facts in self._facts):
            raise CheckFailed(
                "NCCL_COMM_BLOCKING=1 overrides our nonblocking communicators, which an abort can end; unset it"
            )
        return f"NCCL {version}", []

    def _watchdog(self, team: Team) -> Found:
        if refused := next((facts["watchdog_refused"] for facts in self._facts if facts["watchdog_refused"]), ""):
            raise CheckFailed(refused)
        if not any(facts["gpus"] for facts in self._facts):
            raise NotHere("no GPU")
        team.whole()
        return ", ".join(f"{name}={value}" for name, value in sorted(team.watchdog.items())), []

    def _communicator(self, team: Team) -> Found:
        team.whole()
        offers = {group: codec.decode(Offer, offer) for group, offer in team.offers.items()}
        kind = communicator_choice.agree(offers).kind
        places = [offer.place for offer in offers.values()]
        if kind == communicator_choice.NCCL:
            return "nccl: every group has a GPU of its own, or may share one", []
        if not all(places):
            return f"gloo: {places.count('')} of {len(places)} groups have no GPU", []
        shares = "several groups share a GPU, which NCCL refuses without NCCL_MULTI_RANK_GPU_ENABLE"
        return f"gloo: {shares}" if len(places) > len(set(places)) else "gloo: this torch was built without NCCL", []

    def document(self) -> dict[str, Any]:
        """Return the JSON document."""
        about: Mapping[str, Any] = {
            "command": ["megatron-ft", *sys.argv[1:]],
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began)),
            "seconds": round(time.time() - self._began, 1),
            "megatron_ft": megatron_ft.__version__,
            "groups": len(self.seats),
            "hosts": [
                {"name": self._hub.host_records[host]["name"], **facts} for host, facts in enumerate(self._facts)
            ],
        }
        return self.found.to_json(about)


def _same(versions: Iterable[str]) -> str:
    """Return the version that all hosts have. Raises ``CheckFailed``."""
    different = sorted(set(versions))
    if len(different) > 1:
        raise CheckFailed(f"hosts have different versions: {', '.join(different)}")
    return different[0]


@contextlib.contextmanager
def _store(address: str) -> Iterator[tuple[str, int]]:
    """A torch store in this process, at that address only, at which communicators meet."""
    with listen(address, 0) as listener:
        store = serve_on(listener)
        yield address, store.port
        del store
