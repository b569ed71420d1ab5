"""Registries of planted bugs."""

from __future__ import annotations


def registry(default=None):
    """Return an empty registry, name -> (a function that plants the bug with ``monkeypatch``, where it is looked for), and
    the decorator that fills it. ``default``: where a bug is looked for, such as seeds, if its name stands alone."""
    found = {}

    def mutation(name, where=default):
        def add(plant):
            found[name] = plant, where
            return plant

        return add

    return found, mutation
