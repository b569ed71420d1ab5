"""Every wait of the package has a limit, or a comment above it says why it ends. A wait is a call that can block, or a loop
that sleeps, or waits for a limited time, and looks again. A call's limit is its timeout, without a None in it; a loop's is a
comparison with a clock that ends it."""

import ast
import re

from tests import sources

FIRST, SECOND = "get join poll result settimeout wait".split(), "acquire communicate wait_for".split()  # the timeout
ELSEWHERE = "accept connect flock readline recv recv_fds recv_into recvfrom select waitid waitpid".split()
OTHERS = "sleep pause sigtimedwait run check_call check_output create_connection readable".split()
OWN = "group rank crew client connector executor".split()  # their methods are the package's own: what waits is inside
UNLIMITED = """thread.join()|event.wait()|event.wait(timeout=None)|event.wait(1 if f else None)|a.wait(keys, None)|a.get()|
job.result()|lock.acquire()|changed.wait_for(due)|process.communicate()|poll.poll(None)|end.accept()|end.settimeout(None)|
socket.create_connection(where)|subprocess.run(command)|os.waitpid(pid, 0)|select.select([], [], [])|readable(end, None)|
fcntl.flock(lock, fcntl.LOCK_EX)|wait_for(a, b)|wait_for(a, lambda: b and now() > deadline)|while 1: sleep()|end.recv(4)|
while not done(): sleep(0.1)|while 1: event.wait(0.1)|while not event.wait(0.1): look()|while 1:; deadline = 3; sleep(1)|
while not done() or monotonic() < deadline: sleep(1)|while 1:; for a in b:;  if now() > deadline: break; sleep(1)|
while 1:; if now() > deadline: complain(); sleep(1)|while 1:; if lost and now() > deadline: raise E; sleep(1)"""
LIMITED = """thread.join(5.0)|', '.join(words)|process.wait(timeout=END_S)|jobs.get(timeout=left)|words.get('key')|
socket.create_connection(a, timeout=2)|os.waitpid(pid, os.WNOHANG)|while 1:; if now() > deadline: break; sleep()|a.poll()|
wait_for(a, lambda: over or now() > deadline)|while not done() and monotonic() < deadline: sleep(1)|end.settimeout(3.0)|
while not (done() or monotonic() > deadline): sleep(1)|while jobs: jobs.pop()|while rank.up(): end.settimeout(3.0)"""


def limited(call):  # None: it cannot block
    if getattr(call.func, "attr", getattr(call.func, "id", "")).strip("_") not in FIRST + SECOND + ELSEWHERE + OTHERS:
        return None
    called, args = ast.unparse(call.func), call.args
    (*owner, name), whose = called.split("."), called.split(".")[-2:][0].strip("_")
    place = (name not in FIRST) + (name == "wait" and len(args) > 1)
    timeout = [word.value for word in call.keywords if word.arg in ("timeout", "timeout_s")] or args[place : place + 1]
    pauses = name.strip("_") in ("sleep", "pause", "sigtimedwait")
    timed = pauses or bool(timeout) and not re.search(r"\bNone\b", ast.unparse(timeout))
    if pauses or re.fullmatch(r"subprocess\.(run|check_\w+)|(.+\.)?(create_connection|readable)", called):
        return timed
    if called == "wait_for":
        return any(isinstance(one, ast.Lambda) and decides(one.body, ast.Or) for one in args)
    if name in ELSEWHERE and owner:
        return None if whose in OWN or re.search("WNOHANG|LOCK_NB|LOCK_UN", ast.unparse(call)) else False
    if owner and name in FIRST + SECOND and (whose, name) != ("rank", "result"):
        words = name in ("get", "join") and args and "thread" not in whose  # of a dictionary, of a string
        return None if words or (name, timed) == ("settimeout", True) or name == "poll" and not args else timed


def decides(test, joined):  # whether a comparison with a clock decides it: all others are joined to that by ``joined``
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return decides(test.operand, ast.Or if joined is ast.And else ast.And)
    if isinstance(test, ast.BoolOp):
        return (any if isinstance(test.op, joined) else all)(decides(value, joined) for value in test.values)
    clock = re.search(r"\b_*(monotonic|clock|now|(\w+_)?deadline)_*\b", ast.unparse(test))
    return clock and isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE)


def polls_for_ever(loop):
    todo = {node for one in (loop.test, *loop.body) for node in ast.walk(one)}
    inside = todo - {one for node in todo if isinstance(node, ast.FunctionDef | ast.Lambda) for one in ast.walk(node)}
    nested = {one for node in todo if isinstance(node, ast.While | ast.For) for one in ast.walk(node)}
    out = {ast.Return: inside, ast.Raise: inside, ast.Break: inside - nested}
    ends = [node.test for node in inside if type(node) is ast.If for one in node.body if one in out.get(type(one), ())]
    pauses = any(isinstance(node, ast.Call) and limited(node) for node in inside)
    return pauses and not decides(loop.test, ast.And) and not any(decides(test, ast.Or) for test in ends)


def unlimited(nodes):  # the lines at which statements with such waits begin
    calls = [node for node in nodes if isinstance(node, ast.Call) and limited(node) is False]
    begins = [(node.lineno, node.end_lineno) for node in nodes if calls and isinstance(node, ast.stmt)]
    lines = {max(first for first, last in begins if first <= call.lineno <= last) for call in calls}
    return lines | {node.lineno for node in nodes if isinstance(node, ast.While) and polls_for_ever(node)}


def test_every_wait_without_a_limit_says_why_it_ends():
    for path in sources.MODULES:
        text = path.read_text(encoding="utf-8")
        said = {text.count("\n", 0, one.end()) + 1 for one in re.finditer(r"^ *# no limit: .*\n( *#.*\n)*", text, re.M)}
        advice = "a timeout, or a comment above it, '# no limit: why it ends'; no comment where there is no such wait"
        found = unlimited(sources.nodes(path))
        assert found == said, f"{path}, lines {found ^ said}: {advice}"
        assert "select.select(" not in text, "it takes no descriptor of 1,024 or more"


def test_a_wait_is_recognised():
    codes = {code: bad for codes, bad in ((UNLIMITED, True), (LIMITED, False)) for code in codes.split("|")}
    read = {code: [*ast.walk(ast.parse(code.strip().replace("; ", "\n ")))] for code in codes}
    assert [code for code, bad in codes.items() if bool(unlimited(read[code])) != bad] == []
