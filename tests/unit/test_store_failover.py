"""The log of claims: the seats that it fences, the hosts that may make the next claim and when; and the seats that a
proposed view must fence."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from megatron_ft.core.lifecycle import store_failover
from megatron_ft.core.lifecycle.store_failover import MINORITY_S, STEP_S, TIE_S, Claim, Outlook, due_s
from megatron_ft.core.protocol import machine
from megatron_ft.core.protocol.machine import Job
from megatron_ft.core.protocol.membership import first_view
from megatron_ft.types import Report

numbers = st.integers(0, 9)
seats = st.frozensets(st.tuples(numbers, st.integers(0, 3)), max_size=5)
claims = st.builds(
    Claim, number=numbers, run_id=st.text(), host=numbers, address=st.text(), fenced=seats, by=numbers, reason=st.text()
)
logs = st.lists(seats, max_size=5).map(
    lambda fences: [Claim(n, "run", 0, "host0:1", fence, 0) for n, fence in enumerate((frozenset(), *fences))]
)


@given(claims, numbers, st.text(), st.text())
def test_a_take_over_moves_the_store_and_fences_no_seat(last, host, address, reason):
    made = store_failover.taken_over(last, host, address, reason)
    assert (made.number, made.run_id) == (last.number + 1, last.run_id)
    assert (made.host, made.address, made.by, made.fenced) == (host, address, host, frozenset())


@given(claims, seats, numbers, st.text())
def test_a_fence_leaves_the_store_where_it_is(last, out, by, reason):
    made = store_failover.fence(last, out, by, reason)
    assert (made.number, made.run_id) == (last.number + 1, last.run_id)
    assert (made.host, made.address, made.by, made.fenced) == (last.host, last.address, by, out)


@given(logs, seats)
def test_a_host_may_claim_while_one_of_its_seats_is_in(log, own):
    out = store_failover.fenced(log)
    assert out == {seat for claim in log for seat in claim.fenced}
    assert store_failover.may_claim(own, log) == (not own or not own <= out)


@given(logs, seats)
def test_a_group_is_unfenced_with_the_seat_that_no_claim_fences(log, members):
    found = store_failover.unfenced(members, log)
    assert found == {group for group, start in members if (group, start) not in store_failover.fenced(log)}


@given(claims)
def test_a_fenced_seat_is_dead_to_a_reader_and_not_known_to_have_ended(claim):
    found = store_failover.verdicts(claim)
    assert {(died.group, died.incarnation) for died in found} == claim.fenced
    assert all(claim.reason == died.reason and not died.ended for died in found)


# --- when an agent claims ---------------------------------------------------------------------------------------------


@st.composite
def partitions(draw):
    """Return all hosts of a view without that of the store, in parts that hear themselves and not each other."""
    everybody = sorted(draw(st.frozensets(st.integers(0, 7), min_size=2)))
    store = draw(st.sampled_from(everybody))
    part_of = {host: draw(st.integers(0, 2)) for host in everybody if host != store}
    return frozenset(everybody), store, part_of


def outlooks(everybody, store, part_of):
    for me, part in part_of.items():
        heard = frozenset(host for host, other in part_of.items() if other == part)
        yield Outlook(me, everybody, heard, frozenset(), store, False, frozenset({(me, 0)}))


@given(partitions())
def test_hosts_that_hear_each_other_take_turns_and_a_majority_is_first(partition):
    everybody, store, part_of = partition
    due = {outlook.me: (due_s(outlook), len(outlook.heard)) for outlook in outlooks(*partition)}
    assert all(when is not None for when, _ in due.values())
    for part in set(part_of.values()):
        turns = sorted(due[host][0] for host in part_of if part_of[host] == part)
        assert all(later - earlier >= STEP_S - 1e-9 for earlier, later in zip(turns, turns[1:], strict=False))
    for when, size in due.values():
        least = 0.0 if 2 * size > len(everybody) else TIE_S if 2 * size == len(everybody) else MINORITY_S
        assert when >= least
    if any(2 * size > len(everybody) for _, size in due.values()):
        assert min(when for when, _ in due.values()) == 0.0
        first = min(due, key=lambda host: due[host][0])
        assert 2 * due[first][1] > len(everybody)


@given(partitions(), st.data())
def test_no_host_claims_a_store_that_is_reached_or_without_a_seat_that_is_in(partition, data):
    outlook = data.draw(st.sampled_from([*outlooks(*partition)])) if partition[2] else None
    if outlook is None:
        return
    other = data.draw(st.sampled_from(sorted(outlook.heard)))
    assert due_s(replace(outlook, answers=True)) is None
    assert due_s(replace(outlook, heard=outlook.heard | {outlook.store})) is None
    assert due_s(replace(outlook, reaching=frozenset({other}))) is None
    assert due_s(replace(outlook, out=outlook.seats)) is None
    alone = replace(outlook, me=max(outlook.hosts) + 1, seats=frozenset(), heard=frozenset())
    assert due_s(alone) is None, "a spare host that hears nobody"
    left_out = replace(outlook, hosts=outlook.hosts - outlook.heard)
    assert due_s(left_out) is None, "what was started again there has no seat"
    stranger = frozenset({max(outlook.hosts) + 1})
    assert due_s(replace(outlook, reaching=stranger)) == due_s(outlook), "whom it does not hear says nothing"


@given(partitions(), st.sampled_from([8, 9]))
def test_a_spare_host_takes_its_turn_and_has_no_vote(partition, me):
    """The share of the hosts that are heard is the same with it."""
    everybody, store, _ = partition
    for outlook in outlooks(*partition):
        spare = replace(outlook, me=me, heard=outlook.heard | {me}, seats=frozenset())
        turns = sorted(spare.heard, key=lambda host: (host - store) % 100)
        share = due_s(spare) - STEP_S * turns.index(me)
        assert (share >= MINORITY_S) == (2 * len(outlook.heard) < len(everybody))
        assert (share < TIE_S / 2) == (2 * len(outlook.heard) > len(everybody))


# --- which seats a view must fence ------------------------------------------------------------------------------------

JOB = Job(shards=4, per_shard=1, buckets=1, steps=2)


def proposed(*events, job=JOB, reporting=(0, 1, 2, 3)):
    """Return the proposal of group 0 once these have reported."""
    state = machine.start(0, job, replace(first_view(4), behind=(), source=None))
    for event in (*events, machine.ReportsSeen(tuple(Report(0, group, 0) for group in reporting))):
        state, actions = machine.step(state, event, 0.0)
    return next(action for action in actions if isinstance(action, machine.Propose))


def silence(by, about):
    """Return the notice that the host of the groups ``by`` hears nothing of that of ``about``."""
    return machine.HostSilent("a", "b", by, about, 1.0)


lost = st.dictionaries(st.integers(1, 3), st.booleans())


@given(lost, st.randoms())
def test_a_view_fences_each_group_that_it_leaves_out_and_that_is_not_known_to_have_ended(lost, random):
    events = [machine.GroupFailed(group, "gone", ended=known) for group, known in lost.items()] or [
        machine.EpochAborted(0, "reset")
    ]
    random.shuffle(events)
    found = proposed(*events)
    assert set(found.view.lost) == set(lost) and found.reads_log == bool(lost)
    assert set(found.fence) == {(group, 0) for group, known in lost.items() if not known}


@given(st.permutations([machine.GroupFailed(1, "given up"), machine.GroupFailed(1, "killed", ended=True)]))
def test_a_group_that_was_given_up_and_has_ended_since_needs_no_fence(events):
    assert proposed(*events).fence == ()


def test_the_end_of_a_later_start_says_nothing_of_a_member():
    """The member may be frozen on a lost host, while a spare host has started its group again."""
    assert proposed(machine.GroupFailed(1, "killed", 1, ended=True)).fence == ((1, 0),)
    ends = machine.GroupFailed(1, "killed", 0, ended=True), machine.GroupFailed(1, "killed", 1, ended=True)
    assert proposed(*ends).fence == () and proposed(*reversed(ends)).fence == ()


def test_a_group_that_is_only_cut_off_is_fenced():
    job = Job(**{**vars(JOB), "settle_s": 0.0})
    found = proposed(silence((0, 1, 2), (3,)), job=job, reporting=(0, 1, 2))
    assert found.fence == ((3, 0),) and found.reads_log


def test_a_group_that_has_left_in_order_is_not_fenced_unless_it_is_given_up():
    state = machine.start(0, JOB, replace(first_view(4), behind=(), source=None, step=1))
    leaves = machine.LeaveAnnounced(3, 0, "told to")
    for events, fence in [((leaves,), ()), ((leaves, machine.GroupFailed(3, "stuck")), ((3, 0),))]:
        after = machine.changed(state, connected=True)
        for event in (*events, machine.ReportsSeen(tuple(Report(0, group, 1) for group in (0, 1, 2)))):
            after, actions = machine.step(after, event, 0.0)
        found = next(action for action in actions if isinstance(action, machine.Propose))
        assert (found.fence, found.reads_log) == (fence, True)


def test_a_view_by_which_no_group_goes_on_fences_none():
    """In a wipe-out, or with too few groups, the members end, and the groups that are left out may be the run."""
    job = Job(**{**vars(JOB), "min_groups": 4})
    wipe_out = [machine.GroupFailed(group, "given up") for group in range(4)]
    for found in (proposed(machine.GroupFailed(1, "given up"), job=job), proposed(*wipe_out)):
        assert found.view.lost and found.fence == () and not found.reads_log


# --- the effects of a fail-over on the protocol -----------------------------------------------------------------------


def test_hosts_that_are_lost_together_do_not_outvote_the_one_that_is_left():
    """The host misses both, and neither has reported: it goes on, and fences them."""
    job = Job(shards=3, per_shard=1, buckets=1, steps=2, report_timeout_s=15.0, settle_s=0.0)
    state = machine.start(2, job, replace(first_view(3), behind=(), source=None))
    found, now = [], 0.0
    events = [silence((by,), (about,)) for by, about in [(2, 0), (2, 1), (0, 1)]]
    while not found and now < 60.0:
        event, now = events.pop() if events else machine.Tick(), now + 1.0
        state, actions = machine.step(state, event, now)
        found = [action for action in actions if isinstance(action, machine.Propose)]
    assert [(action.view.live, action.fence) for action in found] == [((2,), ((0, 0), (1, 0)))]


def test_reports_that_were_read_from_a_lost_store_do_not_count():
    """The groups may have adopted a view since; that view is what they put back into the next store."""
    state = machine.start(0, JOB, replace(first_view(4), behind=(), source=None))
    reports = tuple(Report(0, group, 0) for group in range(4))
    proposals = []
    for event in (machine.EpochAborted(0, "reset"), machine.ReportsSeen(reports[:3]), machine.Replaced(),
                  machine.ReportsSeen(reports[3:]), machine.ReportsSeen(reports)):  # fmt: skip
        state, actions = machine.step(state, event, 0.0)
        proposals.append(any(isinstance(action, machine.Propose) for action in actions))
    assert proposals == [False, False, False, False, True]
