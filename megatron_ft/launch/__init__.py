"""The per-node agent (``agent``) and what it starts in every rank before the user's script (``bootstrap``)."""
