"""How agents get started on several hosts: Slurm, ssh, torchrun, MPI, the DeepSpeed launcher."""
