"""The report's section on Slurm: what the supervisor has noted, what the record knows, what somebody has sent."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from rich.console import Console

from megatron_ft import cli
from megatron_ft.core import slurm_said
from megatron_ft.core.slurm_said import JOB, STEP, UNKNOWN, Said
from megatron_ft.errors import LaunchError
from megatron_ft.launch import slurm as commands
from megatron_ft.launch import slurm_now
from megatron_ft.launch.slurm_notes import Notes
from megatron_ft.report import slurm
from megatron_ft.report.record import RunRecord
from megatron_ft.runtime import history
from tests.unit.test_report import step

SHOWN = "JobId=12 JobName=pretrain JobState=RUNNING Reason=None ExitCode=0:0 NodeList=n[1-4] BatchHost=n1 EndTime=x"


@pytest.fixture
def here(monkeypatch):
    """What the cluster answers; None: it does not."""
    said = SimpleNamespace(cluster="lab", shown=SHOWN, steps=[], rows=[])
    monkeypatch.setenv("SLURM_CLUSTER_NAME", "lab")
    monkeypatch.setattr(commands, "shown", lambda job: said.shown)
    monkeypatch.setattr(commands, "steps", lambda job: said.steps)
    monkeypatch.setattr(commands, "accounted", lambda job: said.rows)
    monkeypatch.setattr(commands, "cluster", lambda: said.cluster)
    monkeypatch.setattr(slurm_now.shutil, "which", lambda name: "/usr/bin/" + name)
    return said


def listed(*names: str) -> list[Said]:
    return [Said(STEP, name, "RUNNING", f"12.{n}", nodes=name.split("/")[2]) for n, name in enumerate(names)]


def notes(run_dir, restarts: int = 0) -> Notes:
    return Notes(run_dir, commands.Job("12", restarts, ("n1", "n2", "n3", "n4"), "n1"), lambda line: None)


def begin(run_dir, run_id: str = "r") -> None:
    history.append(run_dir, "start", run_id=run_id, groups=2, ranks_per_group=1, host="n2")


def lines(run_dir) -> list[dict]:
    return [line for line in history.read(run_dir) if line["event"] == "slurm"]


def hear(own: Notes, run_dir) -> None:
    for line in history.read(run_dir):
        own.hear(line)


def test_nothing_is_noted_before_the_record_of_the_run_has_begun(tmp_path, here):
    """The directory must look untouched to the launch, or still be that of an earlier start."""
    for run_id in ("earlier", "now"):
        own = notes(tmp_path)
        own.begin()
        own.asked("mft/0/n2/0", node="n2", role="agent", host=0)
        own.job()
        own.look(listed("mft/0/n2/0"), [])
        hear(own, tmp_path)
        assert len(lines(tmp_path)) == (2 if run_id == "now" else 0)
        begin(tmp_path, run_id)
        hear(own, tmp_path)
    assert [(line["what"], line["state"]) for line in lines(tmp_path)] == [(JOB, "RUNNING"), (STEP, "RUNNING")] * 2
    job, agent = lines(tmp_path)[2:]
    assert (job["batch"], job["restarts"], job["cluster"], job["job"]) == ("n1", 0, "lab", "12")
    assert (agent["node"], agent["role"], agent["host"], agent["id"]) == ("n2", "agent", 0, "12.0")


def test_changes_are_noted_once_whoever_looks(tmp_path, here):
    begin(tmp_path)
    own = notes(tmp_path)
    hear(own, tmp_path)
    own.asked("mft/0/n3/0", node="n3", role="agent", host=1)
    nodes = [Said(slurm_said.NODE, "n3", state) for state in ("mixed", "allocated", "allocated*", "down*", "idle")]
    for node in nodes:
        own.look(listed("mft/0/n3/0"), [node])
        own.look(None, None)
    own.look([], [])
    other = notes(tmp_path)  # another supervisor
    hear(other, tmp_path)
    other.look([], [nodes[-1]])
    own.srun_ended("mft/0/n3/0", -9)
    own.look([], [])
    here.rows = [
        Said(STEP, "mft/0/n3/0", "CANCELLED", "12.0", "0:9", "n3", start=1),
        Said(JOB, "pretrain", "RUNNING", "12", "0:0"),
        Said(STEP, "extern", "RUNNING", "12.extern"),
        Said(STEP, "mft/0/n3/0", "NODE_FAIL", "12.0", "0:9", "n3"),
    ]
    own.last()
    own.last()
    states = [(line.get("name"), line["state"], line.get("srun")) for line in lines(tmp_path)]
    step_, node = "mft/0/n3/0", "n3"
    assert states == [
        *[(step_, "RUNNING", None), (node, "allocated*", None), (node, "down*", None), (node, "idle", None)],
        *[(step_, "GONE", None), (step_, "GONE", -9), (step_, "NODE_FAIL", None), ("pretrain", "RUNNING", None)],
    ]


def test_a_controller_that_is_away_at_the_end_is_asked_once(tmp_path, here, monkeypatch):
    begin(tmp_path)
    own = notes(tmp_path)
    hear(own, tmp_path)
    here.steps = None
    monkeypatch.setattr(commands, "accounted", lambda job: pytest.fail("asked again"))
    own.last()
    assert lines(tmp_path) == []


def test_a_record_that_cannot_be_written_is_told_once(tmp_path):
    told = []
    own = Notes(tmp_path / "not there", commands.Job("12", 0, ("n1",), "n1"), told.append)
    own.hear({"event": "start", "run_id": "r"})
    own.note("takes over", node="n2")
    own.note("takes over", node="n2")
    assert len(told) == 1 and "run record not written" in told[0]


# --- what the record knows --------------------------------------------------------------------------------------------


def silence(t: float, by: str, about: str, groups: tuple = (), heard: bool = False) -> dict:
    line = {"t": t, "event": "silence", "by": by, "about": about, "heard": heard, "silent_s": 1.0}
    return {**line, "groups_by": [], "groups_about": list(groups)}


def test_a_node_is_lost_that_the_others_hear_nothing_of():
    said = [silence(1.0, by, "n3.cluster", (1,)) for by in ("n2", "n4")]
    view = {"t": 2.0, "event": "view", "lost": {"1": "nothing is heard of it"}}
    took = {"t": 3.0, "event": "host", "what": "took over", "host": "n1", "groups": [1]}
    found = slurm.lost([*said, view, took])
    assert found.keys() == {"n3"} and (found["n3"].groups, found["n3"].to) == ((1,), "n1")


def test_a_node_that_was_cut_off_accuses_all_the_others_and_is_the_lost_one():
    pairs = [("n3", "n2"), ("n3", "n4"), ("n3", "n1"), ("n2", "n3"), ("n4", "n3"), ("n1", "n3")]
    assert slurm.lost([silence(1.0, *pair) for pair in pairs]).keys() == {"n3"}
    assert slurm.lost([silence(1.0, *pair) for pair in pairs[:3]]).keys() == {"n3"}, "nobody else could write"
    groups = {"n2": (0,), "n3": (1,), "n4": (2,), "n1": ()}
    said = [silence(1.0, by, about, groups[about]) for by, about in pairs]
    assert slurm.lost([*said, {"t": 2.0, "event": "view", "lost": {"1": "x"}}]).keys() == {"n3"}
    back = [silence(3.0, *pair, heard=True) for pair in pairs]
    assert slurm.lost([*said, *back]) == {}, "it was heard again, and nobody has gone on without it"
    replaced = slurm.lost([*said, {"t": 2.0, "event": "view", "lost": {"1": "x"}}, *back])
    assert replaced.keys() == {"n3"}


def test_two_lost_nodes():
    pairs = [("n2", "n3"), ("n4", "n3"), ("n2", "n1"), ("n4", "n1")]
    assert slurm.lost([silence(1.0, *pair) for pair in pairs]).keys() == {"n1", "n3"}


@pytest.fixture
def run_dir(tmp_path):
    """Four steps on n2, n3 and n4, with n1 in reserve, where the batch shell was; n1 was lost, and a rank of group 2."""
    begin(tmp_path)
    job = {"what": JOB, "job": "12", "id": "12", "name": "pretrain", "batch": "n1", "restarts": 0, "cluster": "lab"}
    history.append(tmp_path, "slurm", **job, state="RUNNING", exit="0:0")
    for host, node in enumerate(("n2", "n3", "n4", "n1")):
        role = {"role": "agent" if host < 3 else "reserve", "host": host, "node": node}
        line = {"what": STEP, "job": "12", "id": f"12.{host}", "name": f"mft/0/{node}/0", "by": "squeue", **role}
        history.append(tmp_path, "slurm", **line, state="RUNNING")
    fault = {"position": 0, "pid": 7, "host": "n4", "signal": "SIGKILL", "code": None, "how": "waitpid", "detected_s": None}
    history.append(tmp_path, "fault", group=2, **fault, detail="")
    history.append(tmp_path, "rejoined", group=2, incarnation=1, donors={}, step=2, seconds=0.1, received_bytes=1)
    for by in ("n2", "n3", "n4"):
        line = silence(0.0, by, "n1")
        history.append(tmp_path, **{name: value for name, value in line.items() if name != "t"})
    history.append(tmp_path, "slurm", what="takes over", job="12", node="n4")
    for number in range(4):
        history.append(tmp_path, "step", **step(number, 1.0, [0, 1, 2]))
    history.append(tmp_path, "end", step=3, loss=1.0, params_norm=1.0, params_sha256="x")
    history.append(tmp_path, "slurm", what="cancels the job", job="12", node="n4", reason="done", exit_code=0)
    (tmp_path / "timeline").mkdir()
    return tmp_path


def test_a_thousand_agents_of_which_the_same_is_to_be_said_have_one_row(run_dir):
    rows = [Said(STEP, f"mft/0/m{n}/0", "COMPLETED", f"12.{n}", "0:0", f"m{n}") for n in range(10, 1010)]
    said = text_of(run_dir, rows)
    assert "1000 agents" in said and "m17 and 992 more" in said and said.count("it ended in order") == 1


SACCT = """JobID|JobName|State|ExitCode|NodeList
12|pretrain|CANCELLED by 0|0:9|n[1-4]
12.batch|batch|CANCELLED|0:15|n1
12.0|mft/0/n2/0|COMPLETED|0:0|n2
12.3|mft/0/n1/0|COMPLETED|0:0|n1
"""


def text_of(run_dir, newer=()) -> str:
    console = Console(width=300, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(slurm.slurm_table(RunRecord.load(run_dir), newer))
    return console.export_text()


def test_the_record_alone_explains_what_the_supervisor_saw(run_dir):
    rows = {row.split("│")[1].strip(): row for row in text_of(run_dir).splitlines() if row.startswith("│")}
    job = rows["the job (12)"]
    assert "RUNNING" in job and "seen" in job and "its batch node, n1, was lost (nothing was heard of it" in job
    assert "n1 was lost" in rows["agent of host 3, in reserve (12.3)"]
    ended = "its rank 0 of group 2 ended with SIGKILL, and the group came back"
    assert ended in rows["agent of host 2 (12.2)"] and ended not in rows["agent of host 1 (12.1)"]


def test_what_somebody_has_sent_is_worth_more_than_the_record(run_dir, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    file = run_dir / "sacct.txt"
    file.write_text(SACCT)
    assert cli.main(["report", str(run_dir), "--sacct", str(file)]) == 0
    said = capsys.readouterr().out
    for words in (
        "nobody but the second supervisor, on n4, could end the job",
        "0 although n1 was lost",
        "RUNNING, seen",  # what sacct's output leaves out is there from the record
    ):
        assert words in said, said


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("JobID  State\n12  FAILED\n", "has no table of sacct's with JobID, State and ExitCode; have it made by: sacct -j"),
        (SACCT.replace("12", "13"), "is of job 13, and this run was job 12"),
        (None, "No such file or directory; give the file"),
    ],
)
def test_a_file_of_something_else_is_refused(run_dir, capsys, text, error):
    if text is not None:
        (run_dir / "sacct.txt").write_text(text)
    assert cli.main(["report", str(run_dir), "--sacct", str(run_dir / "sacct.txt")]) == 2
    assert error in capsys.readouterr().err


def test_a_run_without_slurm_has_no_such_section(tmp_path, capsys):
    begin(tmp_path)
    history.append(tmp_path, "step", **step(0, 1.0, [0, 1]))
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "Slurm" not in capsys.readouterr().out
    assert cli.main(["report", str(tmp_path), "--slurm"]) == 2
    assert "was not supervised in Slurm" in capsys.readouterr().err


def test_an_older_record_is_explained_too(tmp_path):
    """Its supervisor has noted no states, and names no batch node."""
    begin(tmp_path)
    history.append(tmp_path, "slurm", what="spare step", job="12", node="n3", failures=1)
    history.append(tmp_path, "stop", reason="no group is left", exit_code=7)
    said = text_of(tmp_path, slurm_said.sacct(SACCT))
    assert "user 0 cancelled it, not a supervisor; the run stopped (exit code 7: no group is left)" in said


def test_each_start_of_a_requeued_job_is_told(tmp_path):
    earlier = tmp_path / "earlier" / "0001"
    earlier.mkdir(parents=True)
    history.append(earlier, "slurm", what=JOB, job="12", id="12", name="p", state="RUNNING", restarts=0)
    history.append(earlier, "slurm", what="requeued", job="12", reason="the job's time is up in 299 s")
    begin(tmp_path)
    history.append(tmp_path, "slurm", what=JOB, job="12", id="12", name="p", state="RUNNING", restarts=1)
    history.append(tmp_path, "end", step=0, loss=1.0, params_norm=1.0, params_sha256="x")
    table = "JobID|State|ExitCode\n12|REQUEUED|0:0\n12|COMPLETED|0:0\n"
    said = text_of(tmp_path, slurm_said.sacct(table))
    assert "an earlier start of the job, which was put back into the queue (the job's time is up in 299 s)" in said
    assert "the run got to its end, and the batch shell said so" in said


# --- asking now -------------------------------------------------------------------------------------------------------


def test_the_controller_knows_what_is_there_and_accounting_what_was(here):
    here.rows = slurm_said.sacct(SACCT)
    here.steps = listed("mft/0/n2/0")
    found = {said.id: (said.state, said.by) for said in slurm_now.ask(["12"], "lab")}
    assert found["12"] == ("RUNNING", "scontrol") and found["12.0"][0] == "RUNNING" and found["12.3"][0] == "COMPLETED"
    here.shown, here.steps = SHOWN.replace("RUNNING", "CANCELLED"), []
    found = {said.id: said.state for said in slurm_now.ask(["12"], "lab")}
    assert found["12"] == "CANCELLED by 0", "accounting knows by whom"


def test_without_accounting_squeue_and_scontrol_suffice(here):
    here.steps = listed("mft/0/n2/0")
    assert [said.state for said in slurm_now.ask(["12"], None)] == ["RUNNING", "RUNNING"]
    here.shown, here.steps = None, None
    assert [said.state for said in slurm_now.ask(["12"], None)] == [UNKNOWN]


@pytest.mark.parametrize(("cluster", "error"), [(None, "does not answer"), ("other", "other, and the run was on lab")])
def test_another_cluster_is_not_asked(here, cluster, error):
    here.cluster = cluster
    with pytest.raises(LaunchError, match=error):
        slurm_now.ask(["12"], "lab")


def test_a_machine_without_slurm_is_told(here, monkeypatch):
    monkeypatch.setattr(slurm_now.shutil, "which", lambda name: None)
    with pytest.raises(LaunchError, match="no squeue on this machine"):
        slurm_now.ask(["12"], "lab")
