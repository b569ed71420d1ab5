"""Settings of a run: the ``fault_tolerance`` section, the address of its control store, and the environment of its
ranks."""

from megatron_ft.config.schema import RunConfig

__all__ = ["RunConfig"]
