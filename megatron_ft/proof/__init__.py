"""What shows that a run, or the protocol, is right: simulated groups, agents, hosts, stores and network around the decisions
of ``core``; the replay of a record through them; short runs that compute a step of a finished run again.
"""
