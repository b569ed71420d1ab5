"""Adapters from training engines to the narrow :class:`~megatron_ft.engines.base.Engine` port."""
