"""The per-node agent: it starts ranks, watches them, reports their ends, and starts lost groups again."""
