"""``megatron-ft launch --ssh``: one command that starts agents on all hosts of a hostfile and follows the run."""
