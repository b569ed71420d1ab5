"""The run record -> tables, pictures, a progress bar, trackers. Reads files only; nothing here can touch training."""
