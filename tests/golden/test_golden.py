"""Each hard case ends as its transcript says."""

import pytest

from tests.golden.stories import HERE, STORIES, told


@pytest.mark.parametrize("name", STORIES)
def test_story(name):
    expected = (HERE / f"{name}.txt").read_text()
    assert told(STORIES[name]) == expected, "read the difference; `python -m tests.golden.stories` accepts it"
