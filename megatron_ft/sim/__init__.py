"""A simulated world around the production core: no processes, no real time, every history replayable from its seed."""
