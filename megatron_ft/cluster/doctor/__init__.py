"""``megatron-ft doctor``: checks of one machine (:mod:`.local`) and of all hosts of a run (:mod:`.hosts_check`)."""
