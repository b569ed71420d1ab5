"""``megatron-ft doctor``: what works on this machine (:mod:`.local`), and on all hosts together (:mod:`.together`)."""

from megatron_ft.doctor.local import Finding, run_doctor

__all__ = ["Finding", "run_doctor"]
