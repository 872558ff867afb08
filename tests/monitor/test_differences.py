"""What differs between two records: put in place of what was, it gives the other record."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from ftlayer.monitor.rules.row_json import Difference, Stretches, differences

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 2),
    st.sampled_from((0.0, -0.0, 1.0, 2.5)),
    st.text(" aé,\n1", max_size=6),
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abc"), inner),
    max_leaves=6,
)
TEXTS = st.builds(json.dumps, VALUES)
ROWS = st.dictionaries(st.sampled_from("xyz"), VALUES | TEXTS)


def value_of(stretches: Stretches) -> Any:
    return json.loads("".join(text for text, _ in stretches))


def applied(value: Any, found: list[tuple[tuple[Any, ...], Difference]]) -> Any:
    """The model: put each difference at what is left of its path into a value; what has none is as it was."""
    whole = [each for path, each in found if not path]
    if whole:
        assert json.dumps(value_of(whole[0].before)) == json.dumps(value)
        return value_of(whole[0].after)
    if found and found[0][0][0] is None:
        return applied(json.loads(value), [(path[1:], each) for path, each in found])
    within: dict[Any, list[tuple[tuple[Any, ...], Difference]]] = {}
    gone, come = {}, {}
    for path, each in found:
        if len(path) == 1 and not (each.before and each.after):
            (come if each.after else gone)[path[0]] = each
        else:
            within.setdefault(path[0], []).append((path[1:], each))
    for place, each in gone.items():
        assert json.dumps(value_of(each.before)) == json.dumps(value[place])
    places = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    kept = {at: applied(value[at], within.pop(at, [])) for at in places if at not in gone}
    assert not within
    if isinstance(value, dict):
        return kept | {name: value_of(each.after) for name, each in come.items()}
    if not isinstance(value, list):
        return value
    items = [*kept.values()]
    for at, each in sorted(come.items()):
        items.insert(at, value_of(each.after))
    return items


def plain(value: Any) -> str:
    """A value whose texts of JSON are structures, in one order of keys."""
    if isinstance(value, str) and value[:1] in ("[", "{"):
        value = json.loads(value)
    if isinstance(value, list):
        return json.dumps([plain(each) for each in value])
    if isinstance(value, dict):
        return json.dumps({name: plain(each) for name, each in value.items()}, sort_keys=True)
    return json.dumps(value)


@given(ROWS, ROWS)
@example({"x": 1}, {"x": True})
@example({"x": "[1, 2]"}, {"x": "[0, 1, 2]"})
def test_differences_make_one_record_the_other(before: dict[str, Any], after: dict[str, Any]) -> None:
    found = differences(before, after)
    assert plain(applied(before, [(each.path, each) for each in found])) == plain(after)
    assert bool(found) == (json.dumps(before, sort_keys=True) != json.dumps(after, sort_keys=True))
    for each in found:
        assert any(marked for stretches in (each.before, each.after) for _, marked in stretches)


def drawn(stretches: Stretches) -> str:
    return "".join(f"[{text}]" if marked else text for text, marked in stretches)


def test_what_is_marked() -> None:
    def marked(before: Any, after: Any) -> list[tuple[str, str, str]]:
        return [
            (each.place, *map(drawn, each.shown()))
            for each in differences({"value": before}, {"value": after})
        ]

    assert marked("it costs 12,5 EUR", "it costs 12.5 EUR") == [
        ("value", '"it costs 12[,]5 EUR"', '"it costs 12[.]5 EUR"')
    ]
    assert marked('{"items": [{"n": "1"}, {"n": 2}]}', '{"items":[{"n": 1}, {"n": 2}], "a b": null}') == [
        ("value (JSON).items[0].n", '["1"]', "[1]"),
        ('value (JSON)."a b"', "", "[null]"),
    ]
    assert marked({"who": [1, 2, 3]}, {"who": [2, 3]}) == [("value.who[0]", "[1]", "")]
    assert marked("[1]", "[ 1]") == [("value", '"[1]"', '"[[ ]1]"')]
    # The words of texts that are long are not compared with each other, and what is long is cut where it is shown.
    ((_, before, after),) = marked("x " * 9_000 + "a", "x " * 9_000 + "b " * 9_000)
    assert before.startswith('"x x')
    assert before.endswith('…x x x x x x x x x x x x x x x x x x x x [a]"')
    assert len(after) < 2_200
