"""The file that one group writes for all, when its writer was frozen while the others went on (``run.final_save``)."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import MagicMock

from megatron_ft.run.final_save import FinalSave
from megatron_ft.run.training_loop import BetweenSteps


class Store(dict):
    """The agreement of all groups."""

    put = dict.__setitem__
    settle = dict.setdefault

    def clone(self) -> Store:
        return self

    def delete(self, keys: list[str]) -> None:
        for key in keys:
            self.pop(key, None)


def test_a_writer_that_was_frozen_does_not_replace_what_a_later_save_has_written(tmp_path):
    store, path = Store(), tmp_path / "best.pt"

    def frozen(temporary):
        temporary.write_text("of step 5")
        FinalSave(store, path, "1.0", True, number=(9, 0)).save(lambda place: place.write_text("of step 9"))

    FinalSave(store, path, "0.0", True, number=(5, 0)).save(frozen)
    assert path.read_text() == "of step 9" and [*tmp_path.iterdir()] == [path]
    FinalSave(store, path, "1.0", True, number=(9, 1)).save(lambda place: place.write_text("of step 9, again"))
    assert path.read_text() == "of step 9, again"


def test_the_store_forgets_every_save_of_an_earlier_step(tmp_path):
    """Also the first of two saves of the same file after one step."""
    store, path = Store(), tmp_path / "best.pt"
    access = SimpleNamespace(agreement=store, env=SimpleNamespace(seat="0", position=0))
    loop = MagicMock(step=3, is_writer=True, live=(0,), access=access)
    between = BetweenSteps(loop)
    for text in ("first", "second"):
        between.save(path, lambda place, text=text: place.write_text(text))
    assert path.read_text() == "second" and {f"final/{path}/3.{number}/claim/0" for number in (0, 1)} <= store.keys()
    loop.step = 4
    between.save(tmp_path / "other.pt", lambda place: place.write_text("another file"))
    assert not [key for key in store if key.startswith(f"final/{path}/3.")]
