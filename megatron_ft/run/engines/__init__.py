"""Adapters from training engines to the narrow :class:`~megatron_ft.run.engines.port.Engine` port."""
