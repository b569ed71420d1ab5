"""Hints from the driver: lines as kernels write them, and a log that grows."""

from __future__ import annotations

import pytest

from megatron_ft.utils import gpu_faults

OFF_THE_BUS = "[ 4521.114] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
FAULT = (
    "6,1021,98237,-;NVRM: Xid (PCI:0000:86:00): 31, pid=41873, name=python, Ch 00000008, intr 00000000. MMU Fault: ENGINE "
    "GRAPHICS GPCCLIENT_T1_0 faulted @ 0x7f5a_b4000000"
)
LINK = "Nov 28 02:11:09 node7 kernel: NVRM: Xid (PCI:0000:07:00): 74, pid='8812', name=python3, NVLink: fatal error"
ECC = "kernel: NVRM: Xid (0000:C1:00): 94, Contained: SM (0x1). RST: No, D-RST: No"
OTHER = "[ 4521.2] NVRM: GPU at PCI:0000:3b:00: GPU-8fe3c57b"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (OFF_THE_BUS, "XID 79 on 0000:3b:00 (the GPU has fallen off the bus"),
        (FAULT, "XID 31 on 0000:86:00 (memory page fault"),
        (LINK, "XID 74 on 0000:07:00 (NVLink error"),
        (ECC, "XID 94 on 0000:C1:00 (contained ECC error"),
        ("NVRM: Xid (PCI:0000:01:00): 38, pid=1", "XID 38 on 0000:01:00 (see the catalogue"),
    ],
)
def test_lines_of_the_kernel(line, said):
    (found,) = gpu_faults.xid_lines([OTHER, line, line])
    assert found.startswith(said)


def test_errors_of_other_processes_are_left_out():
    lines = [FAULT, LINK, OFF_THE_BUS]
    assert [text.split()[1] for text in gpu_faults.xid_lines(lines, pid=8812)] == ["74", "79"]


def test_only_what_comes_after_the_start_counts(tmp_path):
    log = tmp_path / "kern.log"
    log.write_text(f"{OFF_THE_BUS}\n")
    watch = gpu_faults.Watch(tmp_path / "absent", [log, tmp_path / "none"])
    assert watch.hints() == ""
    with log.open("a") as file:
        file.write(f"{LINK}\n")
    assert watch.hints().startswith("XID 74")
    assert watch.hints(pid=1) == "" and watch.hints(pid=8812).startswith("XID 74")
    log.write_text(f"{ECC}\n")  # rotated
    assert "XID 94" in watch.hints(pid=1)


def test_a_host_without_gpu_has_no_hints(tmp_path):
    assert gpu_faults.Watch(tmp_path / "absent", []).hints() == ""
