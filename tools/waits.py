"""Every wait of the package with its limit, read from the code: ``python -m tools.waits`` writes docs/timeouts.md anew.

A wait is a call that can block (``.wait()``, ``.join()``, ``.accept()``, ...) or a loop that polls: a ``while`` that sleeps,
or waits for a limited time, and looks again. The limit of a call is its timeout; an expression with a None in it is none.
The limit of a loop is a comparison with a clock or a deadline, in its test, or in an ``if`` of its own that ends it. A wait
without a limit has to be named in ``UNBOUNDED``, with the reason why it ends all the same; tests/unit/test_waits.py fails
for one that is not.
"""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE, PAGE = ROOT / "megatron_ft", ROOT / "docs" / "timeouts.md"
BEGIN, END = "<!-- written by `python -m tools.waits` -->", "<!-- end -->"
PURE = ("core", "simulation", "planning")
"""Packages without any wait."""

_OPTIONAL = {"wait": 0, "join": 0, "get": 0, "result": 0, "acquire": 1, "communicate": 1, "wait_for": 1, "poll": 0}
"""Methods that take a timeout, and at which place. ``poll`` is one of a selector where it has an argument at all."""
_NEVER = ("accept", "recv", "recv_into", "recv_fds", "recvfrom", "connect", "readline", "select")
"""Calls whose timeout is set elsewhere, if at all."""
_TIMED = {"run": "timeout", "check_output": "timeout", "check_call": "timeout", "create_connection": "timeout"}
_PAUSES = ("sleep", "pause", "wait_for")
_LONGEST = 70
_SETTLED = {"readable": 1, "sleep": 0, "settimeout": 0, "sigtimedwait": 1}

_KILLED = "the process was killed before; it ends, unless it is inside the kernel (state D)"
_SERVICE = "a service in a thread of its own that has nothing else to do; closing its socket ends it"
_ABORTED = "between ranks: `detector.collective_timeout_s` between groups; an abort ends it when a rank is lost"
_INSIDE = "inside a group: as long as its ranks live, of which their agents judge; an abort ends it when one is lost"
_NEVER_BLOCKS = "it does not block: "
_ENTRY = "there is an entry, and only this thread takes any"
_TURNS = "the script and the step take turns; as long as a microbatch takes, of which the agents judge"
_THREAD = "a thread of its own that has nothing else to do; whoever has started it tells it to stop"
_STARTS = (
    "interrupted when a rank of the group is lost; one that hangs while it starts is given up by its agent after "
    "`detector.outside_timeout_s`"
)
_BUILDS = "its thread is left behind after BUILD_TIMEOUT_S, and an abort ends it"
_GLOO = (
    "an abort ends it; gloo ends the operation after the communicator's timeout: `detector.collective_timeout_s`, inside a "
    "group 30 days"
)
_COMMAND = "the command itself, until what it watches is over; a signal ends it"
_QUALIFIED = "host 0 waits for the answer for a limited time, and has the process replaced"
UNBOUNDED: dict[tuple[str, str, str], str] = {
    ("qualify/member_process.py", "Member.all_reduce", "wait"): _QUALIFIED,
    ("qualify/member_process.py", "Member.connect", "connect"): _QUALIFIED,
    ("qualify/member_process.py", "Member.messages", "wait"): _QUALIFIED,
    ("qualify/member_process.py", "Member.overlap", "wait"): _QUALIFIED,
    ("qualify/member_process.py", "Member.overlap.step", "wait"): _QUALIFIED,
    ("qualify/member_process.py", "_Pending._wait", "wait"): "what the check is about: an abort ends it",
    ("audit/audit_run.py", "play", "run"): "a run of a few steps, with the limits of every run; Ctrl-C ends both",
    (
        "data/loader.py",
        "Loader.__call__",
        "result",
    ): "one call of the dataset, as for `Prefetcher.get`; a worker that dies ends it",
    (
        "data/loader.py",
        "Loader.__init__",
        "result",
    ): "the start of the workers; the script's `worker_init_fn` is its own code",
    (
        "worker/evaluation.py",
        "Evaluation.share",
        "while (total := agreement.get(f'{self._key}/total')) is None",
    ): "each turn "
    "asks the store, which has its patience, and a group computes itself what comes too late; one that has no state yet "
    "waits for groups that have it, and ends with them",
    ("data/prefetch.py", "Prefetcher._next", "wait_for"): "the thread that reads ahead has nothing else to do",
    ("data/prefetch.py", "Prefetcher.drop", "wait_for"): "one call of the dataset, as for `Prefetcher.get`",
    ("data/prefetch.py", "Prefetcher.get", "wait_for"): "one call of the dataset: `detector.hang_timeout_s`, or "
    "`detector.storage_timeout_s` while other groups are in storage, too",
    (
        "doctor/meeting.py",
        "Channel.receive",
        "readline",
    ): "the socket has a timeout; hosts of the check send whole lines",
    ("doctor/bandwidth.py", "_fill", "recv_into"): "the socket has a timeout, and all of it must come within that",
    ("engines/megatron/megatron_engine.py", "MegatronEngine._finish_grad_sync", "wait"): _INSIDE,
    ("engines/deepspeed/pipeline.py", "Neighbours._receive", "wait"): _INSIDE,
    ("engines/deepspeed/pipeline.py", "Neighbours.settle", "wait"): _INSIDE,
    ("utils/net.py", "_towards", "connect"): _NEVER_BLOCKS + "a datagram socket",
    ("launchers/slurm/job_array.py", "ArrayTask.run", "while True"): _COMMAND,
    ("launchers/ssh/launcher.py", "SshLauncher._exit_code", "result"): _NEVER_BLOCKS + "the request is done",
    ("launchers/ssh/launcher.py", "SshLauncher._end", "result"): "one request over ssh, which has a limit",
    ("launchers/ssh/launcher.py", "SshLauncher._end_agents", "result"): "requests over ssh, each with a limit",
    ("launchers/ssh/launcher.py", "SshLauncher._runs", "result"): _NEVER_BLOCKS + "the request is done",
    ("launchers/ssh/launcher.py", "SshLauncher.ready", "result"): _NEVER_BLOCKS + "the request is done",
    ("launchers/ssh/launcher.py", "SshLauncher.begin_run", "while True"): "the run begins, or an agent ends after "
    "MEET_TIMEOUT_S",
    ("agent/forkserver.py", "ForkServer.close", "wait"): _KILLED,
    ("agent/forkserver.py", "ForkServer.start", "recv"): "the socket has a timeout: _START_S, later _ANSWER_S",
    ("agent/forkserver.py", "Forked._reap", "waitpid"): "the agent polls; waits only for what was killed",
    ("agent/forkserver.py", "_fork", "waitpid"): "the process between forks once and ends",
    ("agent/forkserver.py", "_uses_cuda", "waitpid"): "the forked process answers and ends",
    ("agent/forkserver.py", "reap_strays", "waitpid"): _NEVER_BLOCKS + "the process has ended",
    (
        "agent/forkserver.py",
        "serve",
        "recv",
    ): "the rest of a request that the agent sends at once; it ends with the agent",
    ("agent/forkserver.py", "serve", "recv_fds"): "the server waits for requests, and ends with the agent",
    ("agent/heartbeat.py", "HeartbeatService._receive", "recvfrom"): _NEVER_BLOCKS + "the socket is non-blocking",
    ("agent/heartbeat.py", "HeartbeatService.changes", "get"): _NEVER_BLOCKS + _ENTRY,
    (
        "agent/store_keeper.py",
        "StoreSupervisor._await_first",
        "while last and file_descriptors.readable(served, _FIRST_S)",
    ): "the store's process says that it serves, ends, or says nothing for _FIRST_S",
    ("coordination/store/tcp_store.py", "listen", "accept"): _NEVER_BLOCKS + "the connection was made just before",
    ("utils/wait_notice.py", "notices", "join"): "the thread was told to stop just before",
    ("utils/wait_notice.py", "notices.tell", "while not over.wait(begun + due_s - time.monotonic())"): _THREAD,
    ("agent/heartbeat.py", "HeartbeatService.close", "join"): "the thread looks at its stop every BEAT_S",
    ("agent/store_keeper.py", "StoreSupervisor._end", "waitpid"): _KILLED,
    ("agent/store_keeper.py", "StoreSupervisor.serve", "waitpid"): "the process has ended: nothing reads from its pipe",
    ("agent/process_keeper.py", "await_end", "waitpid"): _KILLED,
    ("agent/process_keeper.py", "keep", "while True"): "a keeper has nothing else to do, and ends with its agent",
    ("launchers/slurm/supervisor.py", "Supervisor.close", "wait"): _KILLED,
    ("launchers/supervisor_loop.py", "SupervisorLoop.follow", "while True"): _COMMAND,
    ("agent/tracker_process.py", "Tracking.end", "wait"): _KILLED,
    ("report/follow.py", "looks", "while True"): _COMMAND,
    ("report/status_command.py", "run", "while goes_on"): _COMMAND,
    ("worker/rejoin/joiner.py", "RejoinCoordinator._follow", "while True"): "a donor that is lost or sends nothing for "
    "`detector.collective_timeout_s` ends the attempt",
    (
        "worker/group_leader.py",
        "GroupLeader._follow",
        "while following.stands < step",
    ): "a donor that sends nothing for `detector.collective_timeout_s` ends it; it returns after each pause",
    (
        "worker/rejoin/joiner.py",
        "RejoinCoordinator.seat",
        "while True",
    ): "a group without a seat ends with the run, or its agent ends it when no group is left",
    (
        "collectives/chained_operations.py",
        "ChainingCommunicator._move",
        "while True",
    ): "a thread of its own, until nothing is under way or an abort begins; each copy and operation has a limit",
    ("collectives/chained_operations.py", "ChainingCommunicator.connect", "connect"): "that of the inner communicator",
    ("collectives/chained_operations.py", "ChainWork.wait", "while not self._end.wait(_LOOK_S)"): _ABORTED,
    ("collectives/chained_operations.py", "Chain.step", "wait"): _NEVER_BLOCKS + "the operation has ended",
    ("collectives/rendezvous.py", "Connector.connect", "result"): _NEVER_BLOCKS + "the build is over",
    ("worker/rejoin/state_sender.py", "StateSender._watch", "readable"): _SERVICE,
    ("worker/rejoin/state_sender.py", "_Follower.serve", "get"): "a thread of its own; dropping the follower wakes it",
    ("auth/handshake.py", "Door._accept", "accept"): _NEVER_BLOCKS + "the listener is readable, and does not block",
    ("auth/handshake.py", "Door._read", "recv"): _NEVER_BLOCKS + "the connection is readable, and does not block",
    (
        "auth/handshake.py",
        "_receive",
        "recv",
    ): "the socket's timeout is what is left of TIMEOUT_S for all of a handshake",
    ("collectives/intra_group.py", "IntraGroup._carry_out", "wait"): _INSIDE,
    ("collectives/intra_group.py", "_meet", "result"): _NEVER_BLOCKS + "the build is over, or it is given up",
    ("worker/explicit_loop.py", "ExplicitLoop.loss_fn", "get"): _TURNS,
    ("worker/explicit_loop.py", "ExplicitLoop.microbatches", "get"): _TURNS,
    ("worker/explicit_loop.py", "ExplicitLoop.backward", "get"): _TURNS,
    ("worker/explicit_loop.py", "ExplicitLoop.commit", "get"): _TURNS,
    ("worker/explicit_loop.py", "ExplicitLoop.await_commit", "get"): _TURNS,
    ("worker/final_save.py", "FinalSave._shown", "join"): "it writes one key at most: `store_patience_s`",
    ("worker/final_save.py", "FinalSave._shown.show", "while not over.wait(_LEASE_S / 8)"): _THREAD,
    ("worker/final_save.py", "FinalSave.save", "while True"): "a writer that shows nothing "
    "for 5 s is lost, and a rank that cannot write waits twice as long",
    ("worker/group_leader.py", "GroupLeader._drain_verdicts", "get"): _NEVER_BLOCKS + _ENTRY,
    ("collectives/p2p_channel.py", "P2PChannels._receive", "recv"): _INSIDE,
    ("collectives/p2p_channel.py", "P2PChannels.build", "settimeout(None)"): _INSIDE,
    ("worker/rank_executor.py", "RankExecutor._exchange", "wait"): _ABORTED,
    ("worker/rank_executor.py", "RankExecutor._receive_bucket", "wait"): _ABORTED,
    ("collectives/bucket_allreduce.py", "Reduction._finish", "wait"): _ABORTED,
    ("coordination/store/etcd_http.py", "Gateway._ask", "connect"): "the connection has a timeout, the attempt's",
    ("coordination/store/etcd_http.py", "Gateway._refused_certificate", "recv"): "the socket has a timeout of a second",
    (
        "coordination/store/etcd_http.py",
        "Gateway.watch",
        "readline",
    ): "the socket has a timeout: what is left of the call's",
    (
        "coordination/store/call_guard.py",
        "_Worker._work",
        "get",
    ): "the guard's thread waits for calls; dropping the guard ends it",
    ("collectives/state_transfer.py", "receive_state", "wait"): _ABORTED,
    ("collectives/state_transfer.py", "send_state", "wait"): _ABORTED,
    (
        "collectives/framing.py",
        "_fill",
        "recv_into",
    ): "the socket has a timeout: CALL_TIMEOUT_S, _TIMEOUT_S for copies, "
    "`detector.collective_timeout_s` for a group that follows",
    ("agent/checkpoint_cache.py", "CheckpointCache._mirror", "while not self._stop.wait(_LOOK_S)"): _THREAD,
    ("agent/forkserver.py", "_fork", "while os.getppid() == middle"): "the process between forks once and ends",
    ("agent/heartbeat.py", "HeartbeatService._run_on", "while not self._stop.is_set()"): _THREAD,
    (
        "agent/node_agent.py",
        "Agent._stay_for_others",
        "while not self._hosts.all_left() and self._hosts.beats.anybody_heard()",
    ): "the other agents leave or are not heard any more (`heartbeat_timeout_s`); a signal ends it",
    (
        "agent/node_agent.py",
        "Agent._supervise",
        "while self._ranks.living() or (deadline is None and (self._restart ...",
    ): _COMMAND,
    (
        "agent/process_keeper.py",
        "await_end",
        "while True",
    ): "a keeper has nothing else to do than to wait for the process that it keeps, and ends with its agent",
    (
        "agent/store_keeper.py",
        "_serve",
        "while server is not None",
    ): "the store's process has nothing else to do, and ends with its keeper",
    ("agent/store_takeover.py", "StoreTakeover._run", "while not self._stop.wait(BEAT_S)"): _THREAD,
    ("auth/handshake.py", "Door._serve", "while not self._closed"): _SERVICE,
    (
        "utils/directory_lock.py",
        "Lock._keep",
        "while not self._stop.wait(self._beat_s) and (not self._lost)",
    ): _THREAD,
    (
        "collectives/gloo_communicator.py",
        "PointToPoint.wait",
        "while self._thread.is_alive()",
    ): _GLOO,
    ("collectives/gloo_communicator.py", "Collective.wait", "while True"): _GLOO,
    ("collectives/gloo_communicator.py", "Rounded.wait", "wait"): _GLOO,
    (
        "collectives/two_level_communicator.py",
        "TwoLevelCommunicator.connect",
        "connect",
    ): "that of the inner communicator",
    ("collectives/cuda_nccl.py", "CudaNccl._sum_in_fp32.operations", "wait"): _NEVER_BLOCKS + "a stream waits",
    ("collectives/cuda_nccl.py", "CudaNccl._queue", "wait"): _NEVER_BLOCKS + "the device's stream waits",
    ("collectives/intra_group.py", "IntraGroup.use", "connect"): "an abort ends it when a rank of the group is lost",
    ("collectives/nccl_communicator.py", "Confirmed.wait", "wait"): _ABORTED,
    ("collectives/nccl_communicator.py", "NcclCommunicator.confirm", "wait"): _ABORTED,
    ("collectives/nccl_communicator.py", "NcclCommunicator.connect", "connect"): _BUILDS,
    ("collectives/rendezvous.py", "Build._run", "connect"): _BUILDS,
    (
        "collectives/group_world.py",
        "World._meet",
        "wait_for(lambda: agreement.get(name) is not None, interrupted)",
    ): _STARTS,
    ("collectives/intra_group.py", "_meet.wait", "wait_for(condition, interrupted)"): _STARTS,
    ("collectives/p2p_channel.py", "P2PChannels.heard", "while len(received) < _MESSAGE.size"): _NEVER_BLOCKS
    + "it reads what is there",
    ("collectives/p2p_channel.py", "_call", "wait_for(lambda: agreement.get(name) is not None, interrupted)"): _STARTS,
    (
        "collectives/rendezvous.py",
        "Connector.connect",
        "wait_for(build.over, interrupted)",
    ): "its members have `detector.collective_timeout_s` to come, then it has BUILD_TIMEOUT_S; news interrupt it",
    (
        "collectives/rendezvous.py",
        "wait_for",
        "while not condition()",
    ): "it has no clock; every use of it is listed with the place where it is",
    ("collectives/user_process_groups.py", "UserProcessGroups._run", "wait"): _THREAD,
    ("collectives/user_process_groups.py", "UserProcessGroups._run", "while True"): _THREAD,
    ("collectives/user_process_groups.py", "UserProcessGroups._run", "while not self._lost.wait(_LOOK_S)"): _THREAD,
    ("coordination/key_sweeper.py", "Sweeper._run", "wait"): _THREAD,
    ("coordination/store/claim_log.py", "Locator.follow.run", "while not pause.wait(_LOOK_S)"): _THREAD,
    (
        "coordination/store/etcd_http.py",
        "Gateway._call",
        "while True",
    ): "each attempt looks at what is left of the call's timeout first",
    (
        "coordination/store/tcp_store.py",
        "_made",
        "while not ended.wait(_PROBE_EVERY_S)",
    ): "torch's attempt has a timeout; it is left before when no process listens there, or the store has moved",
    ("coordination/watcher.py", "Watcher._listen", "while not self._stopped.is_set()"): _THREAD,
    ("data/prefetch.py", "Prefetcher._next", "while True"): _THREAD,
    (
        "faults/injector.py",
        "Injector.run",
        "while not self._over() and (self._undos or any((case.state not in  ...",
    ): _COMMAND,
    ("launchers/ssh/remote.py", "_watch", "while content['code'] is None"): "the agent's keeper, until the agent ends",
    ("utils/file_descriptors.py", "readable", "poll"): "each use of `readable` is listed by itself, with its timeout",
    (
        "worker/checkpointing/coordinator.py",
        "CheckpointCoordinator._stop",
        "while reason is None",
    ): "the attempt to save has a limit, the end of the epoch ends it, and agents kill ranks 25 s after a stop",
    (
        "worker/group_leader.py",
        "GroupLeader._finish",
        "while not self._is_over()",
    ): "after `detector.collective_timeout_s` the epoch ends, and groups that are not done are left out",
    (
        "worker/peer_lost.py",
        "wait_for_return",
        "while not (rank.lost_because or census.halted) and census.changed. ...",
    ): "each turn is news of one loss; without any it ends after _CULPRIT_S",
    (
        "worker/progress_counters.py",
        "ProgressCounters._beat_on",
        "while not pause.wait(BEAT_S)",
    ): "the thread that beats, until the process ends",
    (
        "worker/rejoin/joiner.py",
        "RejoinClient._look_for_seat",
        "while guest is self._receiver",
    ): "a thread beside one attempt to come back, and ends with that",
    (
        "worker/rejoin/state_receiver.py",
        "StateReceiver._await",
        "while not all(map(there, self._streams))",
    ): "a stream without data for `detector.collective_timeout_s` is an error; news interrupt it",
}
"""(file, function, call) -> why the wait ends."""


@dataclass(frozen=True, order=True)
class Wait:
    """One call that can block. ``limit``: the expression of its timeout, None where it has none."""

    path: str
    function: str
    call: str
    limit: str | None

    @property
    def key(self) -> tuple[str, str, str]:
        return self.path, self.function, self.call


def waits() -> list[Wait]:
    """Return the waits of the whole package, sorted; equal ones of a function once."""
    found: set[Wait] = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        name = str(path.relative_to(PACKAGE))
        if name.split("/")[0] not in PURE:
            found |= set(_Reader(name, ast.parse(path.read_text(encoding="utf-8"))).found)
    return sorted(found, key=lambda wait: (wait.key, wait.limit or ""))


class _Reader(ast.NodeVisitor):
    def __init__(self, path: str, tree: ast.Module) -> None:
        self._path, self._names, self.found = path, [], []
        self._constants = {
            target.id: ast.unparse(node.value)
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        self.visit(tree)

    def _named(self, node: ast.AST) -> None:
        self._names.append(node.name)
        self.generic_visit(node)
        self._names.pop()

    visit_FunctionDef = visit_ClassDef = visit_AsyncFunctionDef = _named

    def visit_While(self, node: ast.While) -> None:
        if _polls(node):
            self._add(_shortened(f"while {ast.unparse(node.test)}"), _until(node))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        for call, limit in _of(node):
            self._add(call, limit)
        self.generic_visit(node)

    def _add(self, call: str, limit: str | None) -> None:
        if limit in self._constants:
            limit = f"{limit} = {self._constants[limit]}"
        self.found.append(Wait(self._path, ".".join(self._names) or "module", call, limit))


def _walk(node: ast.While, without: tuple[type, ...]) -> Iterator[ast.AST]:
    """Walk the nodes that a loop runs itself, test included."""
    todo: list[ast.AST] = [node.test, *node.body]
    while todo:
        inner = todo.pop()
        if not isinstance(inner, (ast.FunctionDef, ast.Lambda, *without)):
            yield inner
            todo += ast.iter_child_nodes(inner)


def _polls(node: ast.While) -> bool:
    """Return whether the loop polls. A call without a limit is named by itself, and the loop around it does not count
    as polling."""
    calls = [inner for inner in _walk(node, ()) if isinstance(inner, ast.Call)]
    return any(_name(call).strip("_") in _PAUSES or any(limit for _, limit in _of(call)) for call in calls)


def _until(node: ast.While) -> str | None:
    """Return the comparison with a clock that ends the loop whatever else is true; None if there is none."""
    tests = [
        inner.test for inner in _walk(node, (ast.While, ast.For)) if _ends(inner, ast.Break | ast.Return | ast.Raise)
    ]
    tests += [inner.test for inner in _walk(node, ()) if _ends(inner, ast.Return | ast.Raise)]
    return _decides(node.test, ast.And) or next(filter(None, (_decides(test, ast.Or) for test in tests)), None)


def _ends(node: ast.AST, how: types.UnionType) -> bool:
    return isinstance(node, ast.If) and any(isinstance(inner, how) for inner in node.body)


def _decides(test: ast.expr, joined: type[ast.boolop]) -> str | None:
    """Return the comparison with a clock that decides ``test`` alone: all others are joined to it by ``joined``."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _decides(test.operand, ast.Or if joined is ast.And else ast.And)
    if isinstance(test, ast.BoolOp):
        found = [_decides(value, joined) for value in test.values]
        chosen = next(filter(None, found), None)
        return chosen if isinstance(test.op, joined) or all(found) else None
    ordered = isinstance(test, ast.Compare) and all(
        isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) for op in test.ops
    )
    timed = ordered and any(_is_time(inner) for inner in ast.walk(test))
    return re.sub(r"\s+", " ", ast.unparse(test)) if timed else None


def _is_time(node: ast.AST) -> bool:
    named = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return named.strip("_") in ("deadline", "monotonic", "clock", "now") or named.endswith("_deadline")


def _shortened(text: str) -> str:
    text = re.sub(r"\s+", " ", text)
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4] + " ..."


def _name(node: ast.Call) -> str:
    function = node.func
    return (
        function.attr if isinstance(function, ast.Attribute) else function.id if isinstance(function, ast.Name) else ""
    )


def _of(node: ast.Call) -> Iterator[tuple[str, str | None]]:
    name, method = _name(node), isinstance(node.func, ast.Attribute)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    timeout = next((keywords[word] for word in ("timeout", "timeout_s") if word in keywords), None)
    owner = ast.unparse(node.func.value) if method else ""
    if name in _TIMED and (owner == "subprocess" or name == "create_connection"):
        yield name, _limit(timeout)
    elif name in ("waitpid", "waitid"):
        text = ast.unparse(node)
        if "WNOHANG" not in text:
            yield name, None
    elif name == "flock":
        if "LOCK_NB" not in ast.unparse(node) and "LOCK_UN" not in ast.unparse(node):
            yield name, None
    elif name in _SETTLED:
        place = _SETTLED[name]
        value = node.args[place] if len(node.args) > place else timeout
        limit = _limit(value)
        if name == "settimeout":
            if limit is None:
                yield "settimeout(None)", None
        elif name == "readable" or limit is not None:
            yield name, limit
    elif method and name in _NEVER:
        # gloo's recv starts an operation; connect of ranks, crews and clients is the package's own, and listed where it is.
        if owner.split(".")[-1].strip("_") not in ("group", "rank", "crew", "client", "connector"):
            yield name, None
    elif not method and name == "wait_for":
        tests = [_decides(value.body, ast.Or) for value in node.args if isinstance(value, ast.Lambda)]
        yield (
            _shortened(ast.unparse(node)),
            next(filter(None, tests), None),
        )  # of collectives.rendezvous: it has no clock
    elif method and name in _OPTIONAL and owner not in ("os.environ", "os.path"):
        place = 1 if name == "wait" and len(node.args) > 1 else _OPTIONAL[name]  # a store's: keys, then the timeout
        if name == "poll":
            if node.args:
                yield name, _limit(node.args[0])
            return
        value = node.args[place] if len(node.args) > place else timeout
        if name in ("get", "join") and value is not None and timeout is None:
            if name == "join" and not isinstance(node.func.value, ast.Constant) and "thread" in owner.lower():
                yield name, _limit(value)
            return  # a dictionary's, or a string's
        if name == "get" and node.args:
            return
        if name == "result" and owner in ("self._rank", "rank"):
            return
        yield name, _limit(value)


def _limit(value: ast.expr | None) -> str | None:
    """Return a limit as text; an expression that may be None is none."""
    if value is None or any(isinstance(inner, ast.Constant) and inner.value is None for inner in ast.walk(value)):
        return None
    return re.sub(r"\s+", " ", ast.unparse(value))


def tables() -> str:
    found = waits()
    lines = ["## Waits with a limit in the call", "", "| where | call | limit |", "|---|---|---|"]
    lines += [f"| `{w.path}` `{w.function}` | `{w.call}` | `{w.limit}` |" for w in found if w.limit is not None]
    lines += ["", "## Waits that end for another reason", "", "| where | call | why it ends |", "|---|---|---|"]
    for key in sorted({w.key for w in found if w.limit is None}):
        lines.append(f"| `{key[0]}` `{key[1]}` | `{key[2]}` | {UNBOUNDED.get(key, '?')} |")
    return "\n".join(line.replace("||", "\\|\\|") for line in lines)


def page() -> str:
    """Return the page as it ought to be."""
    text = PAGE.read_text(encoding="utf-8")
    head, tail = text[: text.index(BEGIN)], text[text.index(END) :]
    return f"{head}{BEGIN}\n\n{tables()}\n\n{tail}"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
