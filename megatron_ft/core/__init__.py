"""The decisions, as functions of values to values: no torch, clock, thread, randomness or environment (a test reads the
imports).

``run``, ``host`` and ``proof`` are shells around this package.
"""
