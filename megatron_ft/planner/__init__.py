"""The planner: what a policy costs in time, before a run, from closed forms; and which one to take.

``closed_forms`` are SPARe's equations (arXiv 2603.00357) with what they leave open, ``quotas`` those of policies without
wipe-out (ReCoVer, arXiv 2605.11215, and stacked quotas), ``cluster`` the input, ``presets`` known clusters, ``inputs``
reads files and flags, ``estimate`` puts the equations together, ``tables`` and ``plots`` show them.

**Every assumption**, for whoever compares a simulation with these numbers:

1. *Failures* of the whole system come with mean ``mtbf_s`` between them, however many groups are live or absent; each
   takes one group, drawn evenly from the live ones. Only the mean enters, except in ``restart``, where the time between
   failures is exponential. No racks, no frail nodes, no Weibull.
2. *Steps.* A shard takes ``compute_s`` = ``step_s - allreduce_s`` on one group, a microbatch a G-th of it, whoever
   computes it; ``allreduce_s`` does not depend on how many groups are live. No stragglers, no jitter.
3. *A masked failure* stalls everybody for ``detection_s + reconfigure_s`` plus the patch; the step's one all-reduce comes
   after that, and of an interrupted one nothing is counted. Work of the step is never lost. Failures strike stalls as they
   strike steps, at the same rate, and each costs its own stall.
4. *Patch*: SPARe one stack with the chance q_k (``closed_forms.patch_chance``); replication one stack, always (that
   explains SPARe's published times, although a copy exists); recover and quotas ceil(lost / survivors) microbatches,
   recover only where it finds no spare (``quotas.boundaries``).
5. *States.* Between two restarts the k-th failure finds k - 1 groups dead, and each state lasts ``mtbf_s`` on average. The
   time of a run weighs states by time (steps per second are averaged); SPARe's S_bar weighs them evenly, as published.
6. *Wipe-out* (spare, replication; any failure in ``restart``): back to the last checkpoint, half a period is computed
   again, the job is down for ``detection_s + restart_s``, then all groups are live. Nothing fails in a restart.
   SPARe and replication never restart for another reason.
7. *Without rejoin* recover and stacked_quota restart on purpose after the best number of failures: a checkpoint, then
   ``restart_s``, then all groups are live; nothing is computed again.
8. *With rejoin* a group is absent for ``detection_s + rejoin_s``, groups are repaired side by side, and one that enters
   costs everybody ``reconfigure_s`` more. All groups absent is a wipe-out as in 6.
9. *Checkpoints* stop everybody for ``checkpoint_s``, every T_c seconds of wall time. Where no wipe-out is due in the run,
   T_c is the period for one wipe-out in a run (insurance); its checkpoints are paid for, the wipe-out is not.
10. *Hosting* r shards costs nothing, and a quota's load is the ideal ceil(N*G / live): ``quotas.least_redundancy`` picks
    r so that it is. At a lower r that was asked for, the load is measured (``quotas.hosted_loads``). Samples nobody hosts
    are read as fast as others.
11. *The run is long* compared with the time between restarts. Nobody stops it before its last step.
"""

from megatron_ft.planner.cluster import Cluster
from megatron_ft.planner.estimate import Estimate, Recommendation, evaluate, recommend

__all__ = ["Cluster", "Estimate", "Recommendation", "evaluate", "recommend"]
