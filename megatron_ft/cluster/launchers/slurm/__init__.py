"""Jobs and job arrays in Slurm: the supervisor and the commands it uses."""
