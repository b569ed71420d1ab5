"""What a rank needs to be in a run before it does anything: the control store with its claims, and the first view.

Failures it assumes: the store may die meanwhile; its agent rebuilds it, and nothing is lost with it.
"""

from __future__ import annotations

from contextlib import suppress

from megatron_ft import codec
from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.record import history
from megatron_ft.run.checkpoint import restore
from megatron_ft.run.store import ControlStore, Locator, Log, LogAway, StoreGone, StoreLostMemory, patient
from megatron_ft.run.store.client import Claimant, CoordinationClient, report_collection
from megatron_ft.types import View

_STORE_TIMEOUT_S = 10.0


class RunAccess:
    """One rank's access to its run. ``claimant``: None in a run without a claim log. ``first``: the run's first view, None
    for a group that ``comes_back``: it was started again, or added, while the run goes on. ``origin``: the checkpoint that
    the run goes on from, if there is one."""

    def __init__(self, env: RankEnvironment) -> None:
        self.env, self.comes_back = env, env.incarnation > 0
        self.claimant = self._take_part_in_claims()
        where = env.store if self.claimant is None else self.claimant.log
        self.store = ControlStore(where, env.run_id, _STORE_TIMEOUT_S, secret=env.secret)
        self.store.when_forged(self._record_forged)
        patience_s = env.config.fault_tolerance.store_patience_s
        self.agreement = CoordinationClient(self.store, env.group, patience_s, claimant=self.claimant)
        self.origin: restore.Origin | None = None
        self.first = patient(self._first_view, patience_s=_STORE_TIMEOUT_S)

    def _take_part_in_claims(self) -> Claimant | None:
        env = self.env
        if not env.claims:
            return None
        log = Locator(Log(env.run_dir, env.run_id, env.secret), env.store)
        with suppress(LogAway):  # then the agent's address is the newest known one
            log.poll()
        assert env.host_rank is not None, "an agent that keeps a claim log says which host it is on"
        return Claimant(log, (env.group, env.incarnation), env.host_rank)

    def _first_view(self) -> View | None:
        try:
            self.store.check_begun()
            if self.comes_back:
                return None
            raw, origin = self.store.get("view/0"), self.store.get(restore.KEY)
        except StoreLostMemory:
            self.store.restore()
            raise
        if raw is None:
            raise StoreGone(f"control store {self.env.store} knows no view of run {self.env.run_id}; start it again")
        view = View.from_json(raw)
        self.origin = None if origin is None else codec.decode(restore.Origin, origin)
        self.agreement.adopted(view)
        return view

    def _record_forged(self, key: str) -> None:
        """Record a forged entry of the control store, at position 0 only.

        Only groups read reports, and the group that proposes a view replaces a forged one; agents record all other
        entries.
        """
        if self.env.position == 0 and key.startswith((report_collection(0)[:-1], "view/")):
            with suppress(OSError):
                history.append(self.env.run_dir, "forged", key=key, group=self.env.group)
