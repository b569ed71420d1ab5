"""The loops of other libraries, with a session in place of their own steps. Each module needs its library."""
