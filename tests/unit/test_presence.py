"""The timeline draws each group as the record says: dead, starting, receiving, following, member, or left in order."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_hex

from megatron_ft.record import run_plots
from megatron_ft.record.presence import Stage, stages
from megatron_ft.record.run_record import Lines, RunRecord
from tests.support import disagreements

DEMO = Path(__file__).parent.parent.parent / "docs" / "images" / "demo"
SIGKILL = {"position": 0, "host": "h", "signal": "SIGKILL", "code": None, "detail": "", "how": "agent's waitpid"}
WAY_BACK = ("starting", "receiving", "following", "member")


def line(t: float, event: str, **fields) -> dict:
    return {"t": t, "event": event, **fields}


def view(t: float, epoch: int, live: list[int], lost=None, joined=(), incarnations=None) -> dict:
    more = {"lost": lost or {}, "joined": list(joined), "incarnations": incarnations or {}, "reason": "", "step": epoch}
    return line(t, "view", epoch=epoch, live=live, **more)


def record_of(lines: list[dict]) -> RunRecord:
    return RunRecord(Path("not there"), Lines(sorted(lines, key=lambda one: one["t"])))


def states(record: RunRecord, group: int) -> list[tuple[str, float, float]]:
    return [stage[:3] for stage in stages(record)[group]]


def test_a_group_that_comes_back_is_not_drawn_dead():
    """Killed at 10, noticed at 10.5; started at 11, ready at 12, has the state at 14, is seated by the view of 15."""
    record = record_of(
        [
            line(0.0, "start", groups=2),
            view(1.0, 0, [0, 1]),
            line(10.0, "inject", group=1, position=0, pid=7, signal="SIGKILL", point="backward"),
            line(10.5, "fault", group=1, pid=7, incarnation=0, detected_s=0.5, **SIGKILL),
            view(10.6, 1, [0], {"1": "rank 0 on h (pid 7) ended with SIGKILL"}),
            line(11.0, "restart", group=1, incarnation=1),
            view(15.0, 2, [0, 1], joined=[1], incarnations={"1": 1}),
            line(16.0, "rejoined", group=1, incarnation=1, step=3, seconds=4.0, receive_s=2.0),
            line(20.0, "end", step=9),
        ]
    )
    assert states(record, 0) == [("member", 0.0, 20.0)]
    way_back = [("starting", 11.0, 12.0), ("receiving", 12.0, 14.0), ("following", 14.0, 15.0), ("member", 15.0, 20.0)]
    assert states(record, 1) == [("member", 0.0, 10.0), ("dead", 10.0, 11.0), *way_back]


def test_a_start_that_fails_on_the_way_is_dead_again():
    record = record_of(
        [
            view(0.0, 0, [0, 1]),
            line(5.0, "fault", group=1, pid=7, incarnation=0, detected_s=None, **SIGKILL),
            view(5.1, 1, [0], {"1": "x"}),
            line(6.0, "restart", group=1, incarnation=1),
            line(7.0, "fault", group=1, pid=8, incarnation=1, detected_s=None, **SIGKILL),
            line(9.0, "end", step=9),
        ]
    )
    wanted = [("member", 0.0, 5.0), ("dead", 5.0, 6.0), ("starting", 6.0, 7.0), ("dead", 7.0, 9.0)]
    assert states(record, 1) == wanted


def test_a_group_is_out_from_the_view_on_that_goes_on_without_it():
    """A host that was cut off ends its ranks later. A group that has left in order is not dead; one that is added was not
    there before; a record without ``receive_s``, of an older version, shows no phases."""
    record = record_of(
        [
            view(0.0, 0, [0, 1, 2]),
            view(5.0, 1, [0, 2], {"1": "cut off: host a has heard nothing of host b for 0.8 s"}),
            line(8.0, "fault", group=1, pid=7, incarnation=0, detected_s=None, **SIGKILL),
            view(9.0, 2, [0], {"2": "leaves after step 3: maintenance"}),
            line(9.5, "restart", group=3, incarnation=1),
            view(11.0, 3, [0, 3], joined=[3], incarnations={"3": 1}),
            line(11.5, "rejoined", group=3, incarnation=1, step=3, seconds=1.0),
            line(12.0, "end", step=9),
        ]
    )
    assert states(record, 1) == [("member", 0.0, 5.0), ("dead", 5.0, 12.0)]
    assert states(record, 2) == [("member", 0.0, 9.0), ("left", 9.0, 12.0)]
    assert states(record, 3) == [("starting", 9.5, 11.0), ("member", 11.0, 12.0)]


@st.composite
def lives(draw):
    """A list of (state, incarnation, length) of a group that dies and comes back, or fails on the way, again and
    again."""
    found = [("member", 0)]
    for number in range(1, 1 + draw(st.integers(0, 4))):
        fails = draw(st.booleans())  # it fails before its ranks have loaded the script
        found += [("dead", number - 1), *((state, number) for state in (WAY_BACK[:1] if fails else WAY_BACK))]
    return [(state, number, draw(st.integers(1, 9))) for state, number in found]


def told(lives_: list[list[tuple[str, int, int]]]) -> tuple[list[dict], dict[int, list[Stage]]]:
    """Return the record that such groups leave, and the stages that it must give. Group 0 lives for ever."""
    end = 1 + max((sum(length for *_, length in life) for life in lives_), default=0)
    lines, truth = (
        [line(0.0, "start", groups=1 + len(lives_)), line(end, "end", step=0)],
        {0: [Stage("member", 0, end, 0)]},
    )
    changes = []
    for group, life in enumerate(lives_, 1):
        t, own = 0, []
        for place, (state, number, length) in enumerate(life):
            last = place == len(life) - 1
            own.append(Stage(state, t, end if last else t + length, number))
            if state == "dead":
                who = {"group": group, "pid": 10 * group + number, "incarnation": number}
                lines.append(line(t, "fault", **who, detected_s=None, **SIGKILL))
                changes.append((t, group, None))
            elif state == "starting":
                lines.append(line(t, "restart", group=group, incarnation=number))
            elif state == "member" and number:
                changes.append((t, group, number))
                ready, state_t = own[-3].start, own[-2].start
                took = {"seconds": t - ready, "receive_s": state_t - ready}
                lines.append(line(t, "rejoined", group=group, incarnation=number, **took))
            t += length
        truth[group] = own
    live, incarnations = set(truth), {}
    lines.append(view(0.0, 0, sorted(live)))
    for epoch, (t, group, number) in enumerate(sorted(changes, key=lambda change: change[:2]), 1):
        lost = {str(group): "died"} if number is None and group in live else {}
        if number is None:
            live.discard(group)
        else:
            live.add(group)
            incarnations[str(group)] = number
        joined = [] if number is None else [group]
        lines.append(view(t, epoch, sorted(live), lost, joined, dict(incarnations)))
    return lines, truth


@given(st.lists(lives(), max_size=3))
def test_stages_are_those_of_the_story_that_the_record_tells(lives_):
    lines, truth = told(lives_)
    assert stages(record_of(lines)) == truth


def drawn(record: RunRecord) -> dict[int, list[tuple[str, float, float]]]:
    """Map each row to the bars of the states of groups in the picture, (state, start, end); a bar's colour is its
    state's."""
    figure, axes = run_plots.plt.subplots()
    times = [one["t"] for one in record.lines]
    rows = run_plots._rows(record)
    run_plots._draw(axes, record, rows, stages(record), (0.0, min(times), max(times)))
    names = {to_hex(colour): state for state, (colour, _) in run_plots.STATES.items()}
    found: dict[int, list[tuple[str, float, float]]] = {}
    for bars in axes.collections:
        state = names[to_hex(bars.get_facecolor()[0])]
        for path in bars.get_paths():
            (left, bottom), (right, _) = path.get_extents().get_points()
            found.setdefault(round(bottom + 0.4), []).append((state, left, right))
    run_plots.plt.close(figure)
    return {row: sorted(bars, key=lambda bar: bar[1]) for row, bars in found.items()}


@given(st.lists(lives(), min_size=1, max_size=3))
def test_the_picture_shows_the_stages(lives_):
    """Members are drawn by the spans of their ranks, which these records do not have."""
    lines, truth = told(lives_)
    absent = {group: [stage[:3] for stage in own if stage.state != "member"] for group, own in truth.items()}
    assert drawn(record_of(lines)) == {group: own for group, own in absent.items() if own}


def test_the_picture_in_the_readme_shows_a_record_in_which_the_groups_come_back():
    record = RunRecord.load(DEMO)
    assert disagreements(record) == []
    back = {one["group"]: one for one in record.events("rejoined")}
    assert sorted(back) == [1, 2], "both groups that the demo kills"
    for group in back:
        found = [stage.state for stage in stages(record)[group]]
        assert found == ["member", "dead", *WAY_BACK]


def test_a_step_that_is_recorded_after_the_view_of_its_boundary_was_made_without_the_newcomer():
    """Two processes write the two lines, so either may come first."""
    step = {"loss": 1.0, "microbatches": 4, "live": [0], "duration_s": 1.0}
    record = record_of(
        [
            line(0.0, "start", groups=1),
            view(1.0, 0, [0]),
            view(3.0, 1, [0, 1], joined=[1]),  # from step 1 on
            line(3.1, "step", step=0, epoch=0, **step),
            line(4.0, "end", step=1),
        ]
    )
    assert states(record, 1) == [("member", 3.1, 4.0)]
    assert disagreements(record) == []
