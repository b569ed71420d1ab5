"""Each hard case ends as its story says, and on the way everybody does what its transcript says."""

import pytest

from tests.golden.stories import HERE, STORIES, told


@pytest.mark.parametrize("name", STORIES)
def test_story(name):
    expected = (HERE / f"{name}.txt").read_text()
    assert told(STORIES[name]) == expected, "read the difference; `python -m tests.golden.stories` accepts it"


def test_every_transcript_has_its_story():
    assert {path.stem for path in HERE.glob("case_*.txt")} == set(STORIES)
