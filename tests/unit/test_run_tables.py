"""Tables and pictures show the contents of the record; a history is followed while it grows."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from megatron_ft.errors import ConfigError, LaunchError
from megatron_ft.plan import measured
from megatron_ft.record import follow, history, run_plots, run_state, run_tables
from megatron_ft.record.presence import stages
from megatron_ft.record.progress import Progress
from megatron_ft.record.run_record import Lines, RunRecord


@pytest.fixture
def run_dir(tmp_path):
    return write_run(tmp_path)


def write_run(run_dir):
    """Write a synthetic run of four steps; group 1 dies in step 2."""
    died = "rank 0 on h (pid 7) ended with SIGKILL"
    lines = [
        ("start", {"run_id": "r", "groups": 2, "ranks_per_group": 1, "host": "h"}),
        ("begin", {"steps": 4, "microbatches": 4, "buckets": 3}),
        ("view", {"epoch": 0, "live": [0, 1], "lost": {}, "joined": [], "reason": "the run starts", "step": 0}),
        *(("step", step(number, 8.0 - number, [0, 1])) for number in range(2)),
        ("inject", {"group": 1, "position": 0, "pid": 7, "signal": "SIGKILL", "point": "reduce 1, step 2"}),
        (
            "fault",
            {
                "group": 1,
                "position": 0,
                "pid": 7,
                "host": "h",
                "signal": "SIGKILL",
                "code": None,
                "detail": "",
                "how": "agent's waitpid",
                "detected_s": 0.025,
            },
        ),
        ("view", {"epoch": 1, "live": [0], "lost": {"1": died}, "joined": [], "reason": died, "step": 2}),
        (
            "recovery",
            {
                "step": 2,
                "epoch": 1,
                "patched": 2,
                "patched_by": {"0": 2},
                "buckets_kept": 1,
                "buckets_redone": 2,
                "state_from": None,
                "stall_s": 0.125,
            },
        ),
        ("patch", {"step": 2, "epoch": 1, "group": 0, "prefetched": ["2/1.0"], "fetched": ["2/1.1"]}),
        *(("step", step(number, 8.0 - number, [0])) for number in (2, 3)),
        ("end", {"step": 3, "loss": 5.0, "params_norm": 10.0, "params_sha256": "x"}),
    ]
    for event, fields in lines:
        history.append(run_dir, event, **fields)
    (run_dir / "timeline").mkdir()
    for group in range(2):
        spans = [["compute", 1.0, 2.0], ["reduce", 2.0, 2.2], ["patch", 2.2, 2.4]]
        (run_dir / "timeline" / f"g{group}.p0.jsonl").write_text(
            json.dumps({"step": 2, "epoch": 0, "spans": spans}) + '\n{"step": 3, "ep'
        )
    return run_dir


def step(number: int, loss: float, live: list[int]) -> dict:
    return {"step": number, "loss": loss, "microbatches": 4, "epoch": 0, "live": live, "duration_s": 1.0}


def text_of(table) -> str:
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table)
    return console.export_text()


def test_a_group_that_was_lost_twice_has_a_view_for_each_loss(run_dir):
    """The third start never had a seat, so no view left it out."""
    views = [
        {"epoch": 2, "live": [0, 1], "lost": {}, "joined": [1], "incarnations": {"1": 1}},
        {"epoch": 3, "live": [0], "lost": {"1": "again"}, "joined": [], "incarnations": {"1": 1}},
    ]
    for view in views:
        history.append(run_dir, "view", **view, reason="", step=3)
    first = RunRecord.load(run_dir).faults[0]
    for incarnation in (1, 2):
        again = {name: value for name, value in first.items() if name not in ("t", "event")}
        history.append(run_dir, "fault", **{**again, "incarnation": incarnation})
    found = [failure.view and failure.view["epoch"] for failure in RunRecord.load(run_dir).failures]
    assert found == [1, 3, None]


def test_a_group_whose_host_could_write_nothing_down_is_a_failure_too(run_dir):
    """A node without power loses its agent with its ranks. A group that leaves in order is no failure."""
    cut = "cut off: host a has heard nothing of host n3 for 0.8 s; host b has heard nothing of host n3 for 0.9 s"
    views = [
        {"epoch": 2, "live": [0, 1, 2], "lost": {}, "joined": [1, 2], "incarnations": {"1": 1}},
        {"epoch": 3, "live": [0, 2], "lost": {"1": cut}, "joined": [], "incarnations": {"1": 1}},
        {"epoch": 4, "live": [0], "lost": {"2": "leaves after step 3: maintenance"}, "joined": []},
    ]
    for view in views:
        history.append(run_dir, "view", **view, reason=next(iter(view["lost"].values()), "asks"), step=3)
    record = RunRecord.load(run_dir)
    noted, found = record.failures
    assert noted.fault["signal"] == "SIGKILL" and found.view["epoch"] == 3
    assert (found.fault["group"], found.fault["incarnation"], found.fault["pid"]) == (1, 1, None)
    text = " ".join(text_of(run_tables.failures_table(record)).replace("│", " ").split())
    assert "1 host a has heard nothing of host n3 for 0.8 s the other groups" in text and "host b" not in text
    run_plots.timeline_plot(record, run_dir / "timeline.png")
    run_plots.loss_plot(record, None, run_dir / "loss.png")


def test_a_rank_that_was_given_up_has_no_exit_status(run_dir):
    why = "is stopped (process state T) for 0.5 s"
    fields = {"group": 1, "position": 0, "pid": 8, "host": "h", "signal": None, "code": None, "detail": why}
    history.append(run_dir, "fault", **fields, incarnation=1, how="agent's look at the process", detected_s=None)
    assert f" {why} " in text_of(run_tables.failures_table(RunRecord.load(run_dir)))
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    view = follow.ProgressView(2, follow.Outputs(run_dir, 1, "none"), console)
    view.update({"event": "fault", **fields})
    view.update({"event": "fault", **fields, "code": 3, "detail": "out of memory"})
    said = console.export_text()
    assert f"group 1 lost: rank 0 on h (pid 8) {why}\n" in said
    assert "group 1 lost: rank 0 on h (pid 8) ended with exit code 3 (out of memory)" in said


def test_a_group_that_comes_back_is_listed(run_dir):
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    view = follow.ProgressView(2, follow.Outputs(run_dir, 1, "none"), console)
    start = {"group": 1, "incarnation": 2, "attempt": 1, "after_s": 0.5, "pids": [7, 8], "host": "h"}
    view.update({"event": "restart", **start})
    view.update({"event": "given_up", "group": 1, "incarnation": 2, "reason": "too often"})
    said = console.export_text()
    assert "group 1 is started again on h (incarnation 2, pid 7 8), 0.5 s after it was lost" in said
    assert "group 1 does not come back: too often" in said
    view.update({"event": "restart", **start, "host_rank": 1})
    hosts = [{"host": "h", "what": "took over", "groups": [1]}, {"host": "h(10.0.0.2)", "what": "spare", "groups": []}]
    for event in (hosts[0], {**hosts[0], "host_rank": None}, {**hosts[1], "host_rank": 3}):
        view.update({"event": "host", **event})
    told = console.export_text().splitlines()
    assert told[0].startswith("group 1 is started again on host 1 (h) (incarnation 2, pid 7 8)")
    assert told[1:] == ["host h takes over group 1"] * 2 + ["host 3 (h) is there as a spare"]


def test_the_failures_table_has_the_whole_story(run_dir):
    text = text_of(run_tables.failures_table(RunRecord.load(run_dir)))
    for word in ("SIGKILL at reduce 1, step 2", "agent's waitpid (0.025)", "0.125", "1 / 2", "1 / 1", "steps lost = 0"):
        assert word in text


def test_patches_belong_to_the_recovery_that_counts_them(tmp_path):
    """Two recoveries in one step; a group that goes on with epoch 2 before it breaks belongs to the one of epoch 3."""
    for epoch, group in ((1, 1), (3, 2)):
        view = {"epoch": epoch, "live": [0], "lost": {str(group): "died"}, "joined": [], "reason": "died", "step": 5}
        history.append(tmp_path, "fault", group=group, pid=group, signal="SIGKILL", how="waitpid", detected_s=None)
        history.append(tmp_path, "view", **view)
        history.append(
            tmp_path, "recovery", step=5, epoch=epoch, patched=2, stall_s=0.1, buckets_kept=0, buckets_redone=1
        )
    for step, epoch, samples in ((5, 1, "a"), (5, 2, "b"), (5, 3, "c"), (6, 3, "d")):
        history.append(tmp_path, "patch", step=step, epoch=epoch, group=0, prefetched=[samples], fetched=[])
    found = [[line["prefetched"] for line in failure.patches] for failure in RunRecord.load(tmp_path).failures]
    assert found == [[["a"]], [["b"], ["c"]]]


def test_a_record_without_patches_mentions_none(run_dir):
    path = run_dir / history.FILE
    path.write_text("".join(line for line in path.read_text().splitlines(True) if '"patch"' not in line))
    assert RunRecord.load(run_dir).failures[0].patches == ()
    assert "1 / 1" not in text_of(run_tables.failures_table(RunRecord.load(run_dir)))


def test_a_lost_step_is_counted(tmp_path):
    for number in (0, 2, 3):
        history.append(tmp_path, "step", **step(number, 1.0, [0]))
    assert RunRecord.load(tmp_path).steps_lost == 1


def test_a_lost_last_step_is_counted(tmp_path):
    """The number of the step is known from the end line alone."""
    for number in (0, 1):
        history.append(tmp_path, "step", **step(number, 1.0, [0]))
    history.append(tmp_path, "end", step=2, loss=1.0, params_norm=1.0, params_sha256="x")
    assert RunRecord.load(tmp_path).steps_lost == 1


def test_a_damaged_record_is_read_as_far_as_possible(run_dir):
    """A torn last line, or a file that is missing or damaged, does not hide the rest."""
    with (run_dir / history.FILE).open("a") as file:
        file.write('{"t": 1.0, "event": "sto')
    (run_dir / "config.json").write_text('{"groups": 2}')
    record = RunRecord.load(run_dir)
    assert [line["step"] for line in record.steps] == [0, 1, 2, 3]
    assert [line["pid"] for line in record.injects] == [line["pid"] for line in record.faults] == [7]
    assert [line["epoch"] for line in record.views] == [0, 1]
    assert [line["patched"] for line in record.recoveries] == [2]
    assert (record.config, record.end["step"]) == ({"groups": 2}, 3)


def test_groups_are_known_without_the_start_line(tmp_path):
    history.append(tmp_path, "step", **step(0, 1.0, [0, 2]))
    assert RunRecord.load(tmp_path).groups == 3
    (tmp_path / "config.json").write_text('{"groups": 5}')
    assert RunRecord.load(tmp_path).groups == 5


def test_a_broken_connection_that_came_before_the_notice_is_listed(run_dir):
    record = RunRecord.load(run_dir)
    record.events("view")[1]["noticed"] = "group 0 reports: a connection broke"
    assert record.failures[0].how == "group 0 reports: a connection broke, then agent's waitpid"


def test_runs_are_compared_step_by_step(run_dir, tmp_path_factory):
    other = tmp_path_factory.mktemp("reference")
    for number in range(4):
        history.append(other, "step", **step(number, (8.0 - number) * (1.001 if number == 2 else 1.0), [0, 1]))
    history.append(other, "end", step=3, loss=5.0, params_norm=10.1, params_sha256="y")
    found = run_tables.compare(RunRecord.load(run_dir), RunRecord.load(other))
    assert found["largest relative loss difference"] == pytest.approx(0.001, rel=0.01)
    assert found["relative difference of the parameters' norm"] == pytest.approx(0.1 / 10.1)


def test_a_directory_without_a_record_is_named(tmp_path):
    file = tmp_path / "file"
    file.touch()
    for path in (tmp_path, tmp_path / "not there", file):
        with pytest.raises(LaunchError, match="holds no run record"):
            RunRecord.load(path)


def test_pictures_are_drawn(run_dir):
    record = RunRecord.load(run_dir)
    assert [span.phase for span in record.spans((1, 0))] == ["compute", "reduce", "patch"]
    run_plots.loss_plot(record, record, run_dir / "loss.png")
    run_plots.loss_plot(record, None, run_dir / "alone.png")
    run_plots.timeline_plot(record, run_dir / "timeline.png")
    spans = [["forward", 1.0, 1.5], ["backward", 1.5, 2.0], ["patch_forward", 2.2, 2.3], ["patch_backward", 2.3, 2.4]]
    (run_dir / "timeline" / "g0.p1.jsonl").write_text(json.dumps({"step": 2, "epoch": 0, "spans": spans}))
    run_plots.timeline_plot(RunRecord.load(run_dir), run_dir / "stages.png")
    for name in ("loss.png", "alone.png", "timeline.png", "stages.png"):
        content = (run_dir / name).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) > 5000


def test_a_rank_whose_record_was_lost_with_it_is_not_shown_as_idle(run_dir, monkeypatch):
    """From its last span to its death it was alive."""
    record, drawn = RunRecord.load(run_dir), []
    monkeypatch.setattr(run_plots, "_save", lambda figure, path: drawn.append(figure))
    run_plots.timeline_plot(record, run_dir / "timeline.png")
    (stage,) = [stage for stage in stages(record)[1] if stage.state == "dead"]
    last = max(span.end for span in record.spans((1, 0)) if span.end <= stage.start)
    hatched = [bars for bars in drawn[0].axes[0].collections if bars.get_hatch() == run_plots._UNSAID["hatch"]]
    (box,) = [path.get_extents() for bars in hatched for path in bars.get_paths()]
    assert box.width == pytest.approx(stage.start - last) and box.y0 == pytest.approx(0.6)
    run_plots.plt.close(drawn[0])


def test_a_run_that_diverged_stays_on_the_difference_axis(run_dir):
    """0.1 is far above what a healthy run shows; an axis that ended below would hide it."""
    record = RunRecord.load(run_dir)
    reference = RunRecord(run_dir, Lines({**line, "loss": line.get("loss", 0.0) * 1.1} for line in record.lines))
    figure, axes = run_plots.plt.subplots()
    run_plots._difference(axes, record, reference)
    assert axes.get_ylim()[1] > 0.1
    run_plots.plt.close(figure)


def test_an_interruption_is_shown_with_a_normal_step_before_it(run_dir):
    record = RunRecord.load(run_dir)
    ((start, stop, title),) = run_plots._interruptions(record)
    assert title == "group 1 lost (SIGKILL) in step 2: the others wait 0.125 s"
    assert start == pytest.approx(record.injects[0]["t"] - 1.5)
    assert stop > record.steps[2]["t"]


def test_following_waits_for_whole_lines_and_skips_torn_ones(tmp_path):
    path = tmp_path / history.FILE
    looks = iter(range(100))

    def stop() -> bool:
        """Stop after some looks; called once per look at the file, which grows from look to look."""
        look = next(looks)
        if look == 1:
            path.write_text('{"event": "a"}\n{"eve')
        if look == 2:
            with path.open("a") as file:
                file.write('nt": "b"}\ntorn\n{"event": "c"}\n')
        return look == 3

    assert [event["event"] for events in follow.looks(tmp_path, stop) for event in events] == ["a", "b", "c"]


def test_without_a_terminal_progress_is_plain_lines(run_dir, capsys):
    with follow.ProgressView(2, follow.Outputs(run_dir, 1, "none"), Console(force_terminal=False, width=200)) as view:
        for event in history.read(run_dir):
            view.update(event)
    said = capsys.readouterr().out
    for word in (
        "step 1/4",
        "group 1 lost: rank 0 on h (pid 7) ended with SIGKILL",
        "step 2 goes on: 2 microbatches taken over by groups 0; stalled 0.12 s",
        "all 4 steps are done",
    ):
        assert word in said


@pytest.mark.parametrize(("told", "goes_on"), [(True, True), (True, False), (False, True), (False, False)])
def test_a_run_that_ends_before_its_last_step_says_why_and_what_goes_on(told, goes_on):
    early = run_state.early_end(60, lambda: told, goes_on)
    said = Progress(2).take({"event": "end", "step": 23, "loss": 1.5, **early})
    assert said.startswith("stopped after step 24 of 60: ") and said.endswith(", loss 1.5000")
    assert ("told to stop" in said, "the same command goes on" in said) == (told, goes_on)


def test_on_a_terminal_there_is_a_bar(run_dir):
    console = Console(force_terminal=True, width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with follow.ProgressView(2, follow.Outputs(run_dir, 1, "none"), console) as view:
        *events, end = history.read(run_dir)
        for event in events:
            view.update(event)
        assert view._bar.tasks[0].completed == 4
        assert "live 1/2" in view._bar.tasks[0].fields["line"]
        view.update(end)
        assert "live" not in view._bar.tasks[0].fields["line"], "a run that has ended has no live groups"


def test_the_planner_learns_from_the_record_of_a_run(run_dir):
    found = measured.measured(RunRecord.load(run_dir), gpus_per_node=2)
    assert (found["gpus"], found["gpus_per_group"], found["step_s"]) == (2, 1, 1.0)
    assert (found["detection_s"], found["reconfigure_s"]) == (0.025, 0.125)
    assert "rejoin_s" not in found and "checkpoint_s" not in found, "nothing came back, nothing was saved"
    lines = history.read(run_dir)
    assert found["node_mtbf_hours"] == pytest.approx((lines[-1]["t"] - lines[0]["t"]) / 3600)
    history.append(run_dir, "view", epoch=2, live=[0, 1], lost={}, joined=[1], reason="asks", step=4)
    history.append(run_dir, "checkpoint", step=4, blocked_s=0.5)
    fault, view = (
        next(line["t"] for line in history.read(run_dir) if line["event"] == e) for e in ("fault", "checkpoint")
    )
    found = measured.measured(RunRecord.load(run_dir))
    assert found["checkpoint_s"] == 0.5 and 0 < found["rejoin_s"] <= view - fault


def test_a_run_of_one_step_teaches_nothing(tmp_path):
    history.append(tmp_path, "start", run_id="r", groups=2, ranks_per_group=1, host="h")
    with pytest.raises(ConfigError, match="two are needed"):
        measured.measured(RunRecord.load(tmp_path))
