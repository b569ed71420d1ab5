"""A group that comes back: it receives the state from groups that train."""
