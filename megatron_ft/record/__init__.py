"""The run record: writing, reading, the check of its invariants; the tables, pictures and progress made from it."""
