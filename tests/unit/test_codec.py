"""Every class that travels as JSON by its type hints reads back the same; a value that is not of its type is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ft import codec
from megatron_ft.config.schema import RunConfig
from megatron_ft.core.detection import collective_stalls
from megatron_ft.core.detection.stragglers import Speeds, Track
from megatron_ft.core.lifecycle.store_failover import Claim
from megatron_ft.core.protocol import signals
from megatron_ft.run import orders
from megatron_ft.run.checkpoint.restore import Origin
from megatron_ft.run.collectives.communicator_choice import Offer
from megatron_ft.types import PlanOrigin, Report, View

SIGNALS = get_args(signals.Signal)
ORDERS = [kind for kind in orders.Order.__subclasses__() if kind is not orders.Begin]
OTHERS = [Claim, Offer, Origin, PlanOrigin, Report, Speeds, collective_stalls.Report]
OWN = [RunConfig, View]
"""They have a JSON form of their own (test_schema, test_membership, test_views), most of which is this one."""
NUMBERS = st.integers(-1, 10**6)
PLAIN = {
    int: NUMBERS,
    float: st.floats(allow_nan=False),
    str: st.text(max_size=9),
    Any: st.none() | st.lists(NUMBERS),
}


def of(hint: Any) -> st.SearchStrategy:
    """Return a strategy for all values with this type hint, those of fields with a default included."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in PLAIN or hint in (bool, type(None)):
        return PLAIN.get(hint, st.from_type(hint))
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Sequence, frozenset) or args[1:] == (...,):
        return st.lists(of(args[0]), max_size=4).map(tuple if origin is Sequence else origin)
    if origin is tuple:
        return st.tuples(*map(of, args))
    if origin in (dict, Mapping):
        return st.dictionaries(of(args[0]), of(args[1]), max_size=4)
    if origin is not None or args:
        return st.one_of(*map(of, args))
    return st.builds(hint, **{name: of(hints) for name, hints in traveling(hint).items()})


def traveling(kind: type) -> dict[str, Any]:
    hints = get_type_hints(kind)
    if not is_dataclass(kind):
        return hints
    return {one.name: hints[one.name] for one in fields(kind) if codec.STAYS not in one.metadata}


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(codec.encode(value)))


@pytest.mark.parametrize("kind", [*SIGNALS, *ORDERS, *OTHERS, *OWN], ids=lambda kind: kind.__name__)
@given(data=st.data())
@settings(max_examples=20)
def test_a_value_reads_back(kind, data):
    value = data.draw(of(kind))
    assert codec.decode(kind, through_json(value)) == value


@given(of(View), of(PlanOrigin), st.lists(of(Report), unique_by=lambda report: report.group))
def test_a_view_reads_back_from_both_forms(view, origin, reports):
    of_epoch = [replace(report, epoch=view.epoch - 1) for report in sorted(reports, key=lambda report: report.group)]
    view = replace(view, plan_origin=origin, reports=tuple(of_epoch))
    assert View.from_json(through_json(view)) == view
    names = view.to_json().keys() - {"attempt", "entered"}
    for name in names - {"noticed"}:
        with pytest.raises(KeyError, match=name):
            View.from_json({key: value for key, value in view.to_json().items() if key != name})


@given(st.one_of(*map(of, SIGNALS)))
def test_a_signal_reads_back_by_its_kind(signal):
    assert signals.from_json(json.loads(json.dumps(signals.to_json(signal)))) == signal


@given(st.one_of(*map(of, ORDERS)))
def test_an_order_reads_back_by_its_name(order):
    assert orders.named(type(order).__name__, through_json(order)) == order


@given(NUMBERS, of(orders.Needs))
def test_the_order_to_begin_takes_the_needs_along(step, needs):
    back = orders.named("Begin", through_json(orders.Begin(step, lambda: needs)))
    assert isinstance(back, orders.Begin) and (back.step, back.needs()) == (step, needs)


FIELDS = [
    (kind, name)
    for kind in (*SIGNALS, *ORDERS, *OTHERS)
    for name, hint in traveling(kind).items()
    if is_dataclass(kind) and hint is not View
]


@pytest.mark.parametrize(("kind", "field"), FIELDS, ids=lambda each: getattr(each, "__name__", each))
def test_a_value_of_another_type_is_refused_with_the_name_of_its_field(kind, field):
    with pytest.raises(ValueError, match=f"{kind.__name__}.{field}: "):
        codec.decode(kind, {name: [{"a": []}] for name in [field, *traveling(kind)]})


class Point(NamedTuple):
    x: int
    y: float = 0.5


@dataclass(frozen=True)
class Drawing:
    points: tuple[Point, ...]
    size: tuple[int, int] = (1, 1)
    names: Mapping[int, str | None] | None = None
    chosen: frozenset[tuple[int, int]] = frozenset()
    rest: Any = None


def test_the_forms_of_all_kinds_of_values():
    drawing = Drawing((Point(1),), (2, 3), {4: None, 3: "c"}, frozenset([(2, 0), (1, 5)]), {"any": [1]})
    raw = {"points": [[1, 0.5]], "size": [2, 3], "names": {"4": None, "3": "c"}, "chosen": [[1, 5], [2, 0]]}
    assert codec.encode(drawing) == {**raw, "rest": {"any": [1]}}
    assert codec.decode(Drawing, {**raw, "points": [[1]], "rest": {"any": [1]}}) == drawing
    assert codec.decode(Drawing, {"points": []}) == Drawing(()), "older files lack what was added with a default"


def test_the_forms_that_are_in_files_stay():
    """Of the record, of checkpoints and of the claim log; a plan origin without losses in earlier steps was shorter."""
    origin = PlanOrigin((0, 1), (((1,), ()),))
    assert codec.encode(origin) == [[0, 1], [[[1], []]], []]
    assert codec.decode(PlanOrigin, [[0, 1], [[[1], []]]]) == origin
    speeds = Speeds(0.5, {2: Track((1.0, 2.5), 2.5)})
    assert codec.encode(speeds) == {"longest_s": 0.5, "tracks": {"2": [[1.0, 2.5], 2.5, 0]}}
    about = {
        "number": 1,
        "run_id": "r",
        "host": 2,
        "address": "h:1",
        "fenced": [[0, 1], [3, 0]],
        "by": 2,
        "reason": "x",
    }
    assert codec.encode(Claim(1, "r", 2, "h:1", frozenset([(3, 0), (0, 1)]), 2, "x")) == about


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({}, "Drawing lacks points"),
        ([], "[] is no Drawing"),
        ({"points": [], "colour": 1}, "Drawing has no colour"),
        ({"points": [[1, True]]}, "Drawing.points: Point.y: True is no float"),
        ({"points": [[]]}, "Drawing.points: Point lacks x"),
        ({"points": [[1, 2.0, 3]]}, "Drawing.points: [1, 2.0, 3] is no Point"),
        ({"points": [], "size": [1]}, "Drawing.size: [1] is no tuple"),
        ({"points": [], "names": {"a": "b"}}, "Drawing.names: {'a': 'b'} is no Mapping[int, str | None] | None"),
    ],
)
def test_a_refusal_names_the_field_and_the_value(raw, message):
    with pytest.raises(ValueError) as error:
        codec.decode(Drawing, raw)
    assert str(error.value).replace("collections.abc.", "").replace("typing.", "") == message


def test_a_value_without_a_form_is_refused():
    with pytest.raises(TypeError, match="has no form in JSON"):
        codec.encode(Drawing((object(),)))
