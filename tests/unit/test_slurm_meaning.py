"""What Slurm says and what it means: every word has an explanation, and none says another thing than the record."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from megatron_ft.core import slurm_said
from megatron_ft.core.slurm_meaning import Known, Lost, Role, exit_words, explain, role_of, run_words, short
from megatron_ft.core.slurm_said import ASKED, GONE, JOB, NODE, OPEN, STEP, UNKNOWN, Said

NODES = ("n1", "n2", "n3")
STATES = sorted(OPEN) + [
    *("COMPLETED", "FAILED", "CANCELLED", "CANCELLED by 0", "NODE_FAIL", "TIMEOUT", "OUT_OF_MEMORY", "PREEMPTED"),
    *("DEADLINE", "BOOT_FAIL", "REVOKED", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "A_STATE_OF_TOMORROW", "", GONE),
    *(UNKNOWN, ASKED, "IDLE", "MIXED*", "DOWN*", "DOWN+DRAIN"),
]
EXITS = ["", "0:0", "1:0", "3:0", "7:0", "0:9", "0:15", "0:53", "0:125", "137:0", "9", "torn:"]
WHY = "nothing was heard of it from 12:00:00 on"
STEPS = ["mft/0/n1/0", "mft/0/n2/0", "mft/0/n3/0", "mft/0/n3/2", "mft/1/n2/0", "mft-second/7/1", "batch", "extern", "bash"]
ROLES = {
    "mft/0/n1/0": Role("n1", host=2, reserve=True, t=1.0),
    "mft/0/n2/0": Role("n2", host=0, t=1.0),
    "mft/0/n3/0": Role("n3", host=1, t=1.0),
    "mft/0/n3/2": Role("n3", reserve=True, failures=2, t=20.0),
    "mft-second/7/1": Role("n3", second=True, t=5.0),
}

losses = st.builds(
    Lost, st.just(WHY), t=st.sampled_from([10.0, 30.0]), groups=st.sampled_from([(), (1,)]), to=st.sampled_from(["", "n1"])
)
knowns = st.builds(
    Known,
    code=st.sampled_from([None, 0, 1, 3, 7, 143]),
    why=st.sampled_from(["", "stopped by SIGTERM after step 7"]),
    last=st.sampled_from([None, 7]),
    lost=st.dictionaries(st.sampled_from(NODES), losses, max_size=3),
    ranks=st.sampled_from([{}, {"n2": "its rank 0 of group 0 ended with SIGKILL, and the group came back"}]),
    roles=st.sets(st.sampled_from(sorted(ROLES))).map(lambda names: {name: ROLES[name] for name in names}),
    batch=st.sampled_from(["", "n1"]),
    took_over=st.sampled_from(["", "n3"]),
    cancelled=st.sampled_from(["", "n3"]),
    ended=st.sampled_from([None, 0, 7]),
    overdue=st.sampled_from([frozenset(), frozenset({"mft/0/n3/0"})]),
    drained=st.sampled_from([{}, {"n3": "3 agents have ended there"}]),
    restarts=st.integers(0, 2),
    requeued=st.sampled_from([{}, {0: "its time is up"}]),
    attempt=st.integers(0, 1),
)


@st.composite
def saids(draw):
    kind = draw(st.sampled_from([JOB, STEP, STEP, STEP, NODE]))
    name = draw(st.sampled_from(STEPS)) if kind == STEP else draw(st.sampled_from(NODES)) if kind == NODE else "pretrain"
    own = {"batch": "5.batch", "extern": "5.extern"}.get(name, draw(st.sampled_from(["5.0", ""])))
    return Said(
        kind,
        name,
        draw(st.sampled_from(STATES)),
        t=draw(st.sampled_from([0.0, 15.0])),
        id="5" if kind == JOB else own if kind == STEP else "",
        exit=draw(st.sampled_from(EXITS)),
        nodes=draw(st.sampled_from(["", "n2", "n3", "n[1-3]"])),
        reason=draw(st.sampled_from(["", "BeginTime", "Priority"])),
        srun=draw(st.sampled_from([None, 0, 1, -9])),
        start=draw(st.sampled_from([0, 0, 0, 1])),
    )


@settings(max_examples=1000)
@given(saids(), knowns)
@example(Said(JOB, "pretrain", "CANCELLED by 0", id="5", exit="0:9"), Known(code=0, cancelled="n3", batch="n1"))
def test_every_word_of_slurms_is_explained_and_nothing_else_is_said_than_the_record_says(said, known):
    meaning = explain(said, known)
    text = meaning.means
    assert meaning.what and text and not re.search(r"None|  |\(\)|^[;, ]|[;, ]$|;;", f"{meaning.what} {text}"), text
    # The run.
    whole = said.start == 0 and (said.kind == JOB or said.name == "batch")
    assert not whole or run_words(known) in text
    assert ("got to its end" in text) <= (known.code == 0)
    assert ("the run stopped" in text) <= (known.code not in (None, 0))
    assert ("no end of the run" in text) <= (known.code is None)
    assert ("the others went on" in text) <= (known.code == 0)
    # Its nodes.
    told = set(re.findall(r"(n\d+),? was lost", text))
    assert told <= known.lost.keys(), "only the record knows who was lost"
    role = role_of(said.name, known) if said.kind == STEP and said.id[2:] not in ("batch", "extern") else None
    if role and not said.start and not role.second and role.attempt >= known.attempt:
        loss = known.lost.get(role.node)
        assert (role.node in told) == (loss is not None and loss.t >= role.t)
    if said.kind == NODE:
        assert ("was lost" in text) == (said.name in known.lost)
    assert ("Slurm has noticed" in text) <= (said.base == "NODE_FAIL")
    assert ("Slurm has given it up" in text) <= (said.kind == NODE and slurm_said.is_given_up(said))
    # Who has ended it.
    assert ("the second supervisor cancelled" in text or "it cancelled the job" in text) <= bool(known.cancelled)
    assert ("not a supervisor" in text) <= (not known.cancelled)
    assert ("the supervisor cancelled it" in text) <= (said.name in known.overdue)
    # What is there to be done is about this job.
    told = re.findall(r"(?:scancel|jobid=|release) ?(\S+?)(?=[ ;)]|$)", text)
    assert set(told) <= {"5", said.id, said.name}


LOST = {"n1": Lost(WHY, 10.0), "n3": Lost(WHY, 10.0, (1,), "n1")}
DONE = Known(code=0, roles=ROLES, batch="n1", last=79)
BEREFT = Known(code=0, roles=ROLES, batch="n1", lost=LOST, took_over="n3", cancelled="n3")
LATER = Known(code=143, requeued={0: "its time is up"})


def job(state: str, exit: str = "", **more) -> Said:
    return Said(JOB, "p", state, "5", exit, **more)


def step(name: str, state: str, exit: str = "", **more) -> Said:
    return Said(STEP, name, state, "5.0", exit, **more)


@pytest.mark.parametrize(
    ("said", "known", "words"),
    [
        (job("COMPLETED", "0:0"), DONE, "the run got to its end, and the batch shell said so"),
        (
            job("CANCELLED by 0", "0:9"),
            BEREFT,
            f"the run got to its end; its batch node, n1, was lost ({WHY}), and nobody but the second supervisor, on n3, "
            "could end the job: it cancelled it",
        ),
        (job("CANCELLED by 1000"), Known(last=7), "user 1000 cancelled it, not a supervisor; the record has no end"),
        (job("NODE_FAIL", "1:0"), DONE, "(n1 was the batch node); the run got to its end"),
        (job("RUNNING"), Known(), "it runs; the record has no end of the run"),
        (job("RUNNING"), Known(batch="n1", lost=LOST, took_over="n3"), "by the second supervisor on n3: its batch node"),
        (job("RUNNING"), Known(code=0, batch="n1", lost=LOST), "Slurm lets a job without it run on"),
        (job("RUNNING", t=5.0), Known(code=7, ended=7), "ended with exit code 7, and after that it ended"),
        (job("RUNNING", t=5.0), BEREFT, "the second supervisor, on n3, cancelled it after that"),
        (job("RUNNING"), DONE, "its batch shell is about to end; if it does not: scancel 5"),
        (
            job("PENDING", reason="BeginTime"),
            Known(code=143, why="stopped", requeued={0: "its time is up"}),
            "put back into the queue (its time is up), it starts two minutes later at the soonest (at once: scontrol update "
            "jobid=5 StartTime=now); the run stopped",
        ),
        (
            job("COMPLETED", "0:0"),
            LATER,
            "the job was to go on later (its time is up); the run stopped (exit code 143)",
        ),
        (job("COMPLETED", "0:0"), Known(), "0 is the batch shell's and says nothing of the run"),
        (job("FAILED", "7:0"), Known(code=7, why="no group"), "(exit code 7: no group); the batch shell has passed"),
        (job("FAILED", "1:0"), DONE, "what failed came after it: the batch script ended with exit code 1"),
        (job("COMPLETING"), BEREFT, "lost nodes (n1 n3) keep it waiting until SlurmdTimeout"),
        (step("mft/0/n3/0", "COMPLETED", "0:0"), BEREFT, f"0 although n3 was lost ({WHY}), its group 1 went on on n1"),
        (step("mft/0/n3/0", "NODE_FAIL", "0:9"), BEREFT, "Slurm has noticed, too: n3 was lost"),
        (step("mft/0/n3/0", "RUNNING"), BEREFT, "Slurm lists its step until SlurmdTimeout"),
        (step("mft/0/n3/2", "COMPLETED", "0:0"), BEREFT, "it ended in order; the run got to its end"),
        (step("mft/0/n2/0", "COMPLETED", "0:0"), DONE, "it ended in order; the run got to its end"),
        (step("mft/0/n2/0", "RUNNING"), DONE, "only its slurmstepd has died: scancel 5.0"),
        (step("mft/0/n2/0", "FAILED", "0:9"), DONE, "it ended (SIGKILL): by itself or was killed, and the others went on"),
        (step("mft/0/n2/0", "FAILED", "7:0"), Known(code=7), "it ended with what the run ended with"),
        (step("mft/0/n2/0", "OUT_OF_MEMORY", "0:125"), DONE, "more memory than they were allowed (memory ran out)"),
        (step("mft/0/n2/0", "CANCELLED by 0", "0:9"), BEREFT, "which the second supervisor cancelled"),
        (step("mft-second/7/1", "CANCELLED by 0", "0:9"), DONE, "nobody needed it: the first supervisor ends it"),
        (step("mft/0/n2/0", GONE), DONE, "with what, only accounting could say"),
        (step("mft/0/n3/0", GONE, srun=-9), BEREFT, "srun ended (SIGKILL), which is not to be relied on"),
        (Said(STEP, "batch", "RUNNING", "5.batch"), BEREFT, "Slurm does not give it up until SlurmdTimeout"),
        (Said(STEP, "batch", "CANCELLED", "5.batch"), BEREFT, f"n1, was lost ({WHY}); it was ended with the job"),
        (Said(NODE, "n3", "DOWN*"), BEREFT, "Slurm has given it up"),
        (Said(NODE, "n3", "allocated*"), BEREFT, "hears nothing of it, either, and does not give it up until SlurmdTimeout"),
        (Said(NODE, "n3", "allocated"), BEREFT, "Slurm has not noticed"),
        (job("REQUEUED", start=1), Known(restarts=1, requeued={0: "time"}), "put back into the queue (time)"),
    ],
    ids=str,
)
def test_what_people_ask_about(said, known, words):
    assert words in explain(said, known).means


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("mft/0/n2/0", "agent of host 0"),
        ("mft/0/n1/0", "agent of host 2, in reserve"),
        ("mft/0/n3/2", "agent in reserve, the 3. there"),
        ("mft-second/7/1", "second supervisor, on n3"),
        ("bash", "not one of ours"),
        ("mft/what", "not one of ours"),
    ],
)
def test_what_a_step_was(name, what):
    assert explain(Said(STEP, name, "RUNNING", "5.1"), DONE).what == what


def test_exit_codes_in_words():
    words = {"0:0": "exit code 0", "0:9": "SIGKILL", "137:0": "exit code 137 (SIGKILL, says a shell)"}
    words |= {"0:125": "memory ran out", "0:64": "signal 64", "": "", "x": ""}
    assert {text: exit_words(Said(JOB, "", "FAILED", exit=text)) for text in words} == words


def test_names_of_nodes_are_compared_without_domain_and_address():
    assert [short(name) for name in ("n1", "n1.cluster", "n1(10.0.0.1)", "")] == ["n1", "n1", "n1", ""]


# --- what is read -----------------------------------------------------------------------------------------------------

TABLE = """JobID|JobName|State|ExitCode|NodeList|Reason
12|pretrain|REQUEUED|0:0|n[1-4]|None
12.batch|batch|CANCELLED|0:15|n1|
12.0|mft/0/n2/0|CANCELLED by 0|0:9|n2|
12|pretrain|COMPLETED|0:0|n[1-4]|None
12.batch|batch|COMPLETED|0:0|n1|
12.0|mft/0/n2/0|COMPLETED|0:0|n2|
13|other|FAILED|1:0|n2|NonZeroExitCode
13.0|true
"""


def test_the_table_of_sacct_with_all_starts_of_a_job():
    rows = slurm_said.sacct("$ sacct -D -P\n" + TABLE)
    assert [(row.kind, row.id, row.base, row.start) for row in rows] == [
        (JOB, "12", "REQUEUED", 1),
        (STEP, "12.batch", "CANCELLED", 1),
        (STEP, "12.0", "CANCELLED", 1),
        (JOB, "12", "COMPLETED", 0),
        (STEP, "12.batch", "COMPLETED", 0),
        (STEP, "12.0", "COMPLETED", 0),
        (JOB, "13", "FAILED", 0),
    ]
    assert rows[2] == Said(STEP, "mft/0/n2/0", "CANCELLED by 0", "12.0", "0:9", "n2", by="sacct", start=1)
    assert rows[0].reason == "" and rows[-1].reason == "NonZeroExitCode"
    turned = "\n".join("|".join(reversed(line.split("|"))) + "|" for line in TABLE.splitlines()[:-1])
    assert slurm_said.sacct(TABLE.replace("JobID|", "JobIDRaw|")) == rows
    assert slurm_said.sacct(turned) == rows[:-1] + [rows[-1]], "columns in any order, with a bar at the end"


def test_what_scontrol_and_squeue_say():
    shown = "JobId=12 JobName=pretrain\n   JobState=PENDING Reason=BeginTime\n   ExitCode=0:0 NodeList=(null)\n"
    said = Said(JOB, "pretrain", "PENDING", "12", "0:0", reason="BeginTime", by="scontrol")
    assert slurm_said.scontrol_job(shown) == said
    steps = "12.0|mft/0/n2/0|n2\n12.batch|batch|n1\n"
    assert [step.nodes for step in slurm_said.pasted(shown + steps)] == ["", "n2", "n1"]
    assert slurm_said.scontrol_job("slurm_load_jobs error: Invalid job id specified") is None


@given(st.text(alphabet=st.sampled_from("12.b|:\nJobIDStateExitCode= ")) | st.text())
def test_any_text_can_be_pasted(text):
    for said in slurm_said.pasted(TABLE.splitlines()[0] + "\n" + text):
        assert explain(said, Known()).means


@given(saids())
def test_what_is_noted_is_read_again(said):
    line = {"event": "slurm", "job": "5", "t": 2.0, **slurm_said.to_line(said)}
    kept = slurm_said.from_line(line)
    if said.state:
        assert (kept.kind, kept.name, kept.state, kept.exit, kept.srun, kept.t) == (
            *(said.kind, said.name, said.state, said.exit, said.srun, 2.0),
        )
        assert slurm_said.changed({slurm_said.key(kept): kept}, [said]) == []
    assert slurm_said.from_line({**line, "what": "drained"}) is None


def test_a_step_that_is_listed_no_more_is_noted_once_and_again_when_its_srun_has_ended():
    seen, told = {}, []
    for listed, sruns in (
        ([], {"a": None, "b": None}),
        (["a", "b"], {"a": None, "b": None}),
        (["b"], {"a": None, "b": None}),
        (["b"], {"a": 0, "b": None}),
        (["b"], {"a": 0, "b": None}),
    ):
        for name in sruns:
            seen.setdefault((STEP, name), Said(STEP, name, ASKED))
        now = [Said(STEP, name, "RUNNING") for name in listed]
        news = slurm_said.changed(seen, [*now, *slurm_said.gone(seen, listed, sruns)])
        seen |= {slurm_said.key(said): said for said in news}
        told.append([(said.name, said.state, said.srun) for said in news])
    running = [("a", "RUNNING", None), ("b", "RUNNING", None)]
    assert told == [[], running, [("a", GONE, None)], [("a", GONE, 0)], []]
