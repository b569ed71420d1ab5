"""Decisions only: no torch, clock, thread, randomness or environment (a test reads the imports).

``runtime`` and ``sim`` are two shells around this package. Everything here is a function of values to values.
"""
