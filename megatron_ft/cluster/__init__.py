"""What surrounds a run on a cluster: how agents are started, checks of hosts, faults that are injected."""
