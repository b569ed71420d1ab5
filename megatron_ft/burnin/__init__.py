"""``megatron-ft burn-in``: a run on a cluster that is struck on purpose, and a verdict on it."""
