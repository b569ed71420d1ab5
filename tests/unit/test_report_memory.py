"""A report of a long run needs a fraction of the memory that its timelines would take."""

from __future__ import annotations

import argparse
import json
import tracemalloc

import pytest

from megatron_ft.commands import report_command
from megatron_ft.record import history, run_plots
from megatron_ft.record.run_record import RunRecord

GROUPS, STEPS, SHOWN = 60, 12_000, 3


def write(run_dir) -> int:
    """Write a run of more groups than are shown, ``SHOWN`` of them with a timeline. Return the number of lines of
    those."""
    history.append(run_dir, "start", run_id="r", groups=GROUPS, ranks_per_group=1, host="h")
    for step in range(STEPS):
        live = list(range(GROUPS))
        fields = {"loss": 1.0, "microbatches": GROUPS, "epoch": 0, "live": live, "duration_s": 0.1}
        history.append(run_dir, "step", step=step, **fields)
    (run_dir / "timeline").mkdir()
    lines = [
        json.dumps(
            {"step": step, "epoch": 0, "spans": [["compute", step, step + 0.5], ["reduce", step + 0.5, step + 0.9]]}
        )
        for step in range(STEPS)
    ]
    for group in range(SHOWN):
        (run_dir / "timeline" / f"g{group}.p0.jsonl").write_text("\n".join(lines) + "\n")
    return SHOWN * STEPS


@pytest.mark.long
@pytest.mark.slow
def test_a_report_does_not_hold_the_spans_of_a_run(tmp_path, monkeypatch):
    spans = 2 * write(tmp_path)
    monkeypatch.setattr(
        run_plots, "_save", lambda figure, path: run_plots.plt.close(figure)
    )  # the size is the picture's
    options = argparse.Namespace(run_dir=tmp_path, reference=None, slurm=False, json=False, check=False)
    report_command.run(options)  # imports and caches stay out of the measurement
    tracemalloc.start()
    record = RunRecord.load(tmp_path)
    assert record.losses and not record.failures  # both are cached
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    run_plots.timeline_plot(record, tmp_path / "timeline.png")
    grown = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    assert grown < 80 * spans, f"{grown / spans:.0f} bytes for each span; a span in memory takes about 200"


def test_only_the_ranks_that_are_shown_are_read(tmp_path, monkeypatch):
    write(tmp_path)
    read = []
    spans = RunRecord.spans
    monkeypatch.setattr(RunRecord, "spans", lambda self, rank: read.append(rank) or spans(self, rank))
    monkeypatch.setattr(run_plots, "_save", lambda figure, path: run_plots.plt.close(figure))
    run_plots.timeline_plot(RunRecord.load(tmp_path), tmp_path / "timeline.png")
    assert set(read) == {(group, 0) for group in range(run_plots._MOST_GROUPS)}


def test_a_column_has_the_share_of_each_phase():
    columns = run_plots._Columns(10.0, 10.0 + run_plots._COLUMNS)  # a second each
    columns.add(run_plots.Span("compute", 10.25, 12.5, 0))
    columns.add(run_plots.Span("reduce", 12.5, 12.75, 0))
    assert list(columns.seconds["compute"][:4]) == [0.75, 1.0, 0.5, 0.0]
    assert list(columns.seconds["reduce"][:4]) == [0.0, 0.0, 0.25, 0.0]
