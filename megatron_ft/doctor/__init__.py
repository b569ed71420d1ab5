"""``megatron-ft doctor``: checks of one machine (:mod:`.local`) and of all hosts of a run (:mod:`.hosts_check`)."""

from megatron_ft.doctor.local import Finding, run_doctor

__all__ = ["Finding", "run_doctor"]
