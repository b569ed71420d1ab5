"""Tables, pictures, a progress bar and trackers from the run record. They only read files, and cannot affect
training."""
