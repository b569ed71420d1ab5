"""Megatron-core: a group is a Megatron world of its own, and this layer its outer data parallelism."""
