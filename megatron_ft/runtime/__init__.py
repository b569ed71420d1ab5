"""The shell around ``core``: everything that touches a socket, a file, a clock or a process."""
