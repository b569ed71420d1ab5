"""What carries out the orders of one rank (``run.orders``), an object for each job. It makes no decisions.

The leader of a group (``run.group_leader``) and its followers (``run.group_follower``) both drive one. The training
thread calls everything here except :meth:`RankExecutor.on_signal` and :meth:`RankExecutor.publish_checksums`, which the
watcher's thread calls.

Failures it assumes: any operation between groups may fail (``Broken``: the epoch is over) or, inside the group, end the
group (``Lost``). Verdicts may arrive before their view: they are kept until that view's communicator stands.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

from megatron_ft.config.rank_env import RankEnvironment
from megatron_ft.config.schema import check_standby_memory
from megatron_ft.core.protocol import signals
from megatron_ft.data.order import BatchSchedule
from megatron_ft.data.prefetch import Prefetcher
from megatron_ft.errors import EngineError, StartOver
from megatron_ft.run.collectives.base import stuck
from megatron_ft.run.collectives.communicator_choice import NCCL, Offer
from megatron_ft.run.computing import Computing
from megatron_ft.run.data_identity import Identities
from megatron_ft.run.engines.port import Engine, JointEngine
from megatron_ft.run.evaluation import Evaluation
from megatron_ft.run.finishing import Finishing
from megatron_ft.run.nonfinite import NonFinite
from megatron_ft.run.rank import Rank
from megatron_ft.run.rank_state import RankState
from megatron_ft.run.reducing import Reducing
from megatron_ft.run.registered_state import Registered
from megatron_ft.run.rejoin.joiner import RejoinClient
from megatron_ft.run.saves.participant import CheckpointParticipant
from megatron_ft.run.state_checksum import StateCheck
from megatron_ft.run.state_guard import StateGuard
from megatron_ft.run.step_timer import Slots
from megatron_ft.run.store.client import CoordinationClient
from megatron_ft.types import View


class RankExecutor:
    """The jobs of ``rank``, and what concerns several of them.

    ``evaluation``: of the script, while one runs; ``together``: what the group's ranks write together, while they do. From
    :meth:`attach` on, before the first step: ``engine``; ``computing``, ``reducing`` and ``finishing`` make a step of it, in
    this order; ``state`` is its state as a whole, and ``guard`` compares that with other groups.
    """

    def __init__(self, env: RankEnvironment, agreement: CoordinationClient) -> None:
        rank = self.rank = Rank(env, agreement)
        self.identities = Identities(agreement, env.group, env.position, env.incarnation == 0, env.host_rank)
        self.registered = Registered(BatchSchedule(env.config.microbatches_per_group))
        self.prefetcher = Prefetcher(env.config.fault_tolerance.seed, rank.progress.dataset)
        self.following = RejoinClient(self)
        self.saving = CheckpointParticipant(rank, self.registered)
        self.evaluation: Evaluation | None = None
        self.together: Callable[[Path], object] | None = None

    def attach(self, engine: Engine, await_commit: Callable[[], None] | None = None) -> None:
        """Take the engine. ``await_commit``: see :class:`Finishing`; None: the script has no loop of its own."""
        rank, env, config = self.rank, self.rank.env, self.rank.env.config
        settings, joint = config.fault_tolerance, hasattr(engine, "flush")
        buckets = [engine.local(bucket) for bucket in range(engine.num_buckets)]
        check_standby_memory(config, sum(bucket.nbytes for bucket in buckets))
        device = next((one.device for one in buckets if one.is_cuda), buckets[0].device)
        offer = Offer.of(settings.communicator, device, env.address)
        rank.link.connector.use(device, offer)
        if rank.inner is not None:
            rank.inner.use(device, offer, f"inner/{env.seat}/{NCCL}", rank.agreement.rendezvous)
        slots = Slots(engine, rank.group, rank.position, 1 if joint else rank.size, config.digests)
        states = StateCheck(engine, settings.detector.state_check_steps, self.registered.tensors)
        nonfinite = NonFinite(settings.nonfinite, rank.group, rank.history, rank.agreement)
        guard = StateGuard(rank, slots, states, nonfinite)
        if joint:
            if settings.nonfinite == "recompute":
                raise EngineError(
                    'fault_tolerance.nonfinite is "recompute", which looks at gradients after each microbatch; a pipeline '
                    'has complete ones only after a flush: use "skip" or "stop"'
                )
            rank.join_lines(cast(JointEngine, engine).peers)
        self.engine, self.guard = engine, guard
        self.computing = Computing(rank, engine, self.prefetcher, self.registered, guard)
        self.computing.unchecked = await_commit is None  # a loop of the script's own would see the microbatch again
        self.state = RankState(self.computing, self.registered, guard)
        self.reducing = Reducing(self.computing, self.state, guard)
        self.finishing = Finishing(self.computing, self.state, guard, await_commit)

    # --- verdicts, in the watcher's thread ----------------------------------------------------------------------------

    def on_signal(self, verdict: signals.Verdict) -> None:
        """Unblock the training thread if it waits for a group or rank that is gone."""
        self.following.on_signal(verdict)
        self.rank.link.on_signal(verdict)

    def publish_checksums(self, asked: signals.ChecksumsRequested) -> None:
        """Publish this rank's checksum of each tensor, if its group is asked and it has one for that state."""
        if self.rank.group in asked.groups and hasattr(self, "guard"):  # notices may come before the engine
            self.guard.publish(asked.step)

    def complete(self) -> None:
        """Let the engine finish what the last step has left to the next one, in all ranks of the group."""
        self.rank.inside(self.engine.complete)

    # --- an epoch -----------------------------------------------------------------------------------------------------

    def prepare(self, view: View, step: int) -> None:
        """Begin to build the communicator of ``view``, in parallel with the computation before its first use."""
        self.rank.points.reach("connect", step)
        self.following.see(view)
        self.rank.link.connector.begin(view)

    def connect(self, view: View, step: int, interrupted: Callable[[], bool]) -> bool:
        """Build the communicator of ``view``; False when ``interrupted`` became true first. Raises ``Broken``."""
        link = self.rank.link
        if link.view == view and link.outer is not None:  # built before another rank was interrupted
            return True
        self.rank.progress.take_seat()
        self.prepare(view, step)
        return link.enter(view, interrupted)

    def close_epoch(self) -> None:
        """Close the communicator and drop all pending operations of the present epoch."""
        rank = self.rank
        rank.write_down()
        if rank.link.close():
            self.reducing.drop()
        if reason := stuck():
            raise StartOver(f"group {rank.group}, rank {rank.position}: {reason}; another process takes its place")

    def close(self) -> None:
        """Release resources after the last step."""
        self.prefetcher.close()
        self.rank.write_down()
