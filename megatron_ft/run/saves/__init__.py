"""Checkpoints that groups write together during training."""
