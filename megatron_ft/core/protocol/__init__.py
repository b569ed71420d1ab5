"""The view-change protocol: messages, signals, the state of a group, and the machine that decides."""
