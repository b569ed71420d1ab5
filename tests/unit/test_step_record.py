"""What the script has logged is in the record once, whichever group is the lowest when its writer dies."""

from __future__ import annotations

from megatron_ft.record import history
from megatron_ft.record.history import History
from megatron_ft.run.step_record import StepRecord
from megatron_ft.types import View


def test_values_are_there_when_their_writer_dies_and_a_lower_group_comes_in_the_same_view(tmp_path):
    """Group 1 has logged step 4 and dies before its line is written; group 0, which has not made that step, comes back."""
    before = View(epoch=1, live=(1, 2), reason="group 0 died", lost={0: "it died"})
    after = View(epoch=2, live=(0, 2), reason="group 1 died", lost={1: "it died"}, joined=(0,), step=5)
    records = {group: StepRecord(History(tmp_path), group, before) for group in (0, 1, 2)}
    for group in (1, 2):
        records[group].adopt(before)
        records[group].log(4, {"accuracy": 0.5})
    for group in (0, 2):
        records[group].adopt(after)
    lines = history.read(tmp_path)
    assert [(line["step"], line["values"]) for line in lines if line["event"] == "log"] == [(4, {"accuracy": 0.5})]
    assert [line["epoch"] for line in lines if line["event"] == "view"] == [1, 2]
