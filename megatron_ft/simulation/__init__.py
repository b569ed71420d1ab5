"""Simulators: of the protocol (``protocol/``) and of whole training runs (``training/``)."""
