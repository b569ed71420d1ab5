"""Tables fit every width without a cut word."""

from __future__ import annotations

import io

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from megatron_ft.utils.tables import Column, FittedTable

WORDS = st.lists(st.text("abcdefgh./-_0123456789", min_size=1, max_size=40), max_size=6).map(" ".join)
COLUMNS = st.builds(
    Column, st.sampled_from(["step", "a\nb", "long name"]), st.booleans(), st.integers(0, 3), st.integers(0, 20)
)


def shown(table: FittedTable, width: int) -> str:
    console = Console(width=width, file=io.StringIO())
    table.show(console)
    return console.file.getvalue()


def test_a_table_of_columns_that_may_all_be_left_out_loses_none_of_its_rows():
    assert "a/very/long/word" in shown(FittedTable("Title", [Column("step", last=1)], [["a/very/long/word"]], ""), 10)


@given(data=st.data(), columns=st.lists(COLUMNS, min_size=1, max_size=6), width=st.integers(20, 160))
@settings(max_examples=100)
def test_a_table_fits_and_keeps_every_word_of_the_columns_it_shows(data, columns, width):
    rows = data.draw(st.lists(st.tuples(*(WORDS for _ in columns)), min_size=1, max_size=3))
    text = shown(FittedTable("Title", columns, rows, "Nothing."), width)
    words = set(text.replace("─", " ").split())
    for place, column in enumerate(columns):
        for row in rows if not column.last else ():
            assert set(row[place].split()) <= words, f"a word of column {place} is cut or missing"
        assert column.last or set(column.name.split()) <= words or "─" not in text
    assert "…" not in text
    if "─" in text:
        assert max(map(len, text.split("not shown")[0].splitlines())) <= width
    else:
        places = range(len(columns))
        stay = [p for p in places if not columns[p].last] or [min(places, key=lambda p: (columns[p].last, -p))]
        longest = sum(max(map(len, " ".join([columns[p].name, *(r[p] for r in rows)]).split())) + 2 for p in stay)
        assert longest + 1 > width or any(c.least for c in columns), "paragraphs only where the words do not fit"


def test_columns_are_left_out_in_the_order_that_the_table_gives():
    columns = [Column("step"), Column("first", last=2), Column("second", last=1)]
    table = FittedTable("T", columns, [("1", "x" * 30, "y" * 30)], "Nothing.")
    assert "x" in shown(table, 80) and "y" in shown(table, 80)
    assert "x" not in shown(table, 60) and "y" in shown(table, 60)
    assert shown(table, 60).endswith("not shown at this width: first\n") and "not shown" not in shown(table, 80)
    assert "yyy" not in shown(table, 20) and "step" in shown(table, 20)


def test_an_empty_table_is_a_sentence():
    assert shown(FittedTable("T", [Column("a")], [], "No group was lost."), 80) == "No group was lost.\n"
