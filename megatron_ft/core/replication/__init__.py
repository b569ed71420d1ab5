"""The replication manager: the groups that host each data shard, and the losses that a placement survives."""
