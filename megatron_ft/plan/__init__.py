"""The planner and the simulator of whole training runs. The planner estimates before a run, from closed forms, how much
time each policy costs, and recommends one.

``closed_forms`` has SPARe's equations (arXiv 2603.00357) and the two functions that the paper leaves open, ``quotas``
the equations of policies without wipe-out (ReCoVer, arXiv 2605.11215, and stacked quotas). ``cluster`` is the input,
``presets`` are known clusters, ``inputs`` reads files and flags, ``estimate`` combines the equations, ``plan_tables``
shows the result.

**All assumptions**, for a comparison of a simulation with these numbers:

1. *Failures* of the whole system have the mean ``mtbf_s`` between them, for any number of live or absent groups; each
   takes one group, drawn evenly from the live ones. Only the mean is used, except in ``restart``, where the time
   between failures is exponential. No racks, no Weibull.
2. *Steps.* A shard takes ``compute_s`` = ``step_s - allreduce_s`` on any one group, and a microbatch a G-th of that;
   ``allreduce_s`` does not depend on the number of live groups. No stragglers, no jitter.
3. *A masked failure* stalls all groups for ``detection_s + reconfigure_s`` plus the patch; the step's one all-reduce
   comes after that, and an interrupted one is not counted. Work of the step is never lost. Failures during a stall have
   the same rate as failures during a step, and each costs its own stall.
4. *Patch*: SPARe computes one stack with the probability q_k (``closed_forms.patch_chance``); replication always one
   stack (that explains SPARe's published times, although a copy exists); recover and quotas ceil(lost / survivors)
   microbatches, recover only where it finds no spare (``quotas.boundaries``).
5. *States.* Between two restarts the k-th failure finds k - 1 groups dead, and each state lasts ``mtbf_s`` on average.
   The time of a run weighs states by time (steps per second are averaged); SPARe's S_bar weighs them evenly, as
   published.
6. *Wipe-out* (spare, replication; any failure in ``restart``): the job goes back to the last checkpoint, half a period
   is computed again, the job is down for ``detection_s + restart_s``, then all groups are live. No group fails in a
   restart. SPARe and replication never restart for another reason.
7. *Without rejoin* recover and stacked_quota restart on purpose after the best number of failures: a checkpoint, then
   ``restart_s``, then all groups are live; nothing is computed again.
8. *With rejoin* a group is absent for ``detection_s + rejoin_s``, groups are repaired in parallel, and each entry
   stalls all groups for another ``reconfigure_s``. The absence of all groups is a wipe-out as in 6.
9. *Checkpoints* stop all groups for ``checkpoint_s``, every T_c seconds of wall time. Where no wipe-out is expected in
   the run, T_c is the period for one wipe-out in a run (insurance): its checkpoints are counted, the wipe-out is not.
10. *Hosting* r shards costs nothing, and a quota's load is the ideal ceil(N*G / live): ``quotas.least_redundancy``
    chooses such an r. At a lower given r the load is measured (``quotas.hosted_loads``). Samples that no group hosts
    are read as fast as others.
11. *The whole job* is ended by further failures (fabric, file system) only if ``job_mtbf_hours`` says how often; each is
    a wipe-out as in 6, under every policy, and the checkpoint period takes them into account. With less than one of
    them expected in the run, 9 holds.
12. *The run is long* compared with the time between restarts, and ends with its last step.
"""

from megatron_ft.plan.cluster import Cluster
from megatron_ft.plan.estimate import Estimate, Recommendation, evaluate, recommend

__all__ = ["Cluster", "Estimate", "Recommendation", "evaluate", "recommend"]
