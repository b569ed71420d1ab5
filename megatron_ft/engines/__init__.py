"""Adapters from training engines to the narrow :class:`~megatron_ft.engines.port.Engine` port."""
