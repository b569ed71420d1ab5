"""The file that one group writes for all, when its writer was frozen while the others went on (``worker.final_save``)."""

from __future__ import annotations

from megatron_ft.worker.final_save import FinalSave


class Store(dict):
    """The agreement of all groups."""

    put = dict.__setitem__
    settle = dict.setdefault

    def clone(self) -> Store:
        return self


def test_a_writer_that_was_frozen_does_not_replace_what_a_later_save_has_written(tmp_path):
    store, path = Store(), tmp_path / "best.pt"

    def frozen(temporary):
        temporary.write_text("of step 5")
        FinalSave(store, path, "1.0", True, number=(9, 0)).save(lambda place: place.write_text("of step 9"))

    FinalSave(store, path, "0.0", True, number=(5, 0)).save(frozen)
    assert path.read_text() == "of step 9" and [*tmp_path.iterdir()] == [path]
    FinalSave(store, path, "1.0", True, number=(9, 1)).save(lambda place: place.write_text("of step 9, again"))
    assert path.read_text() == "of step 9, again"
