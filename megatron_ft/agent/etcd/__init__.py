"""An etcd of the run's own: its members, their certificates, and the processes that keep them alive."""
