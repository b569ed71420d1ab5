"""The commands of ``megatron-ft``: ``NAME_command.py`` for each. A module has ``options``, which need no torch, and
``run``."""
