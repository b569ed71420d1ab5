"""Fault injection into real processes (``inject``), and checkers that judge any history (``checkers``)."""
