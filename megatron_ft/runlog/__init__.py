"""The run record: writing, reading, the check of its invariants, and its replay through ``core``."""
