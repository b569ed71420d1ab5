"""Commands of ``megatron-ft`` that several packages serve, or one that imports torch. Each module has ``options``, which
need none of them, and ``run``.
"""
