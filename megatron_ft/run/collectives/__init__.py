"""Communication between ranks: process groups, all-reduce, channels, state transfer, the NCCL watchdog."""
