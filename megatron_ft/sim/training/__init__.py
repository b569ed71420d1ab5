"""Whole training runs, step by step: what a policy costs in time when groups fail. Decisions are those of ``core``."""
