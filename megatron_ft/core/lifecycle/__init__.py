"""Restarts of groups, hosts, stores and whole jobs, and the times of checkpoints."""
