"""The policies of a run, one file each (``policy_port.Policy``), and the algorithms of the two papers that they use.

- SPARe (arXiv 2603.00357): ``spare`` on ``rectlr``.
- ReCoVer (arXiv 2605.11215): ``recover`` on ``recover_roles``.
"""

from megatron_ft.core.scheduling.policies.drop import Drop
from megatron_ft.core.scheduling.policies.policy_port import Batch as Batch
from megatron_ft.core.scheduling.policies.policy_port import Policy as Policy
from megatron_ft.core.scheduling.policies.recover import Recover
from megatron_ft.core.scheduling.policies.replication import Replication
from megatron_ft.core.scheduling.policies.restart import Restart
from megatron_ft.core.scheduling.policies.spare import Spare
from megatron_ft.core.scheduling.policies.stacked_quota import StackedQuota

STACKED_QUOTA, SPARE, RECOVER, REPLICATION, DROP, RESTART = POLICIES = (
    "stacked_quota", "spare", "recover", "replication", "drop", "restart",
)  # fmt: skip
"""The names of the policies, as ``fault_tolerance.policy`` has them."""
SLACK = "slack"
"""A value of ``fault_tolerance.standby``: ``stacked_quota`` with copies in the slack."""


def policy(name: str, *, copies: int = 2, slack: bool = False) -> Policy:
    """Return the policy with this name. ``copies``: of ``replication``; ``slack``: of ``stacked_quota``."""
    return {
        STACKED_QUOTA: StackedQuota(slack=slack),
        SPARE: Spare(),
        RECOVER: Recover(),
        REPLICATION: Replication(copies=copies),
        DROP: Drop(),
        RESTART: Restart(),
    }[name]
