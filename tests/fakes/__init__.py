"""Stand-ins for what this machine lacks, which fail in every way that the real thing is known to fail in."""
