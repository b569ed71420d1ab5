"""Simulation of whole training runs: how much time each policy costs when groups fail. ``core`` makes the decisions."""
