"""Simulated groups, agents, hosts, stores and network around the decisions of ``core``."""
