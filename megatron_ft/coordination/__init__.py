"""Clients of the control store: notices, views, and the store itself with its back ends (``store/``)."""
