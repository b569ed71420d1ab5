"""One rank of a group: the training loop and its session, the leader and its followers, and all that a step goes through."""
