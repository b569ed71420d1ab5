"""Short runs that check whether a model is deterministic, and whether a step of a finished run was computed rightly."""
