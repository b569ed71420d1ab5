"""The scheduler: the group that computes each microbatch after a loss, and the order of microbatches in a group."""
