"""``megatron-ft burn-in``: a run of a Slurm cluster with injected faults, and a verdict."""
