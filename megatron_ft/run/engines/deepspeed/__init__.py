"""DeepSpeed: a group is a DeepSpeed world of its own, and this layer its outer data parallelism."""
