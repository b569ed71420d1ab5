"""``megatron-ft qualify``: what holds on the user's own machines, shown by real processes on them."""
