"""Exact reduction: the grid on which gradients are summed, and which microbatches two groups compute."""
