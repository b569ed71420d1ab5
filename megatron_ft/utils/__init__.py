"""Operating-system and network helpers, each once: files, sockets, signals, the terminal. Imports nothing but
``errors``."""
