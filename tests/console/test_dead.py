"""Records and dead letters: groups first, a search, one of them; counted, confirmed, requeued, purged, exported."""

from __future__ import annotations

import html
import io
import json
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from pyarrow import parquet
from starlette.testclient import TestClient

from ftlayer.errors import ConfigError
from ftlayer.monitor.console.serve import create_app
from ftlayer.vertex.calls import DeadGroups, SelectRecords, Stats

SCRIPT = '"><script>alert(1)</script>'
STREAM = "orders/lines"


@pytest.fixture
def letters(vertex: Any, console: Any) -> None:
    """Five dead letters in two groups, and two pending records."""
    vertex.open(STREAM)
    vertex.kill(
        STREAM, [{"id": n, "price": f"{n},5"} for n in range(3)], "parse", "ValueError: not a price: 7"
    )
    vertex.kill(STREAM, [{"id": n, "price": "1"} for n in (3, 4)], "score", "KeyError: 'who'")
    vertex.persist(STREAM, [{"id": n, "price": "2"} for n in (5, 6)])
    console.watch.refresh()


def dead(vertex: Any) -> int:
    return int(vertex.call(Stats()).values["dead_letters"])


def ids_of(text: str) -> list[str]:
    return re.findall(r'name="group" value="([^"]+)"', text)


def settled(visitor: Any, path: str) -> str:
    """Return the page of a plan when nothing of it is under way."""
    for _ in range(1_000):
        text = visitor.get(path).text
        if "Counting:" not in text and " done.</p>" not in text:
            return text
    raise AssertionError(text)


@pytest.mark.usefixtures("letters")
def test_groups_come_first(visitor: Any) -> None:
    """The largest first, by operator and kind of reason, and each leads to its letters."""
    text = visitor.log_in("reader").get("/dead").text
    assert "5 dead letters in 2 groups" in text
    assert text.index("ValueError: not a price") < text.index("KeyError")
    assert "Requeue selected" not in text
    link = re.search(r'href="(/records\?state=dead[^"]+group=\d+)"', text)
    assert link is not None
    found = visitor.get(link[1].replace("&amp;", "&")).text
    assert "3 records shown" in found
    assert found.count(">ValueError: not a price: 7<") == 3


@pytest.mark.usefixtures("letters")
def test_one_record(visitor: Any) -> None:
    """Payload, attempts, traceback; by key."""
    text = visitor.log_in("reader").get("/records?state=dead&operator=score").text
    (link, *_) = re.findall(r'href="(/records/shop/[0-9a-f]+)"', text)
    page = visitor.get(link).text
    assert "&#34;price&#34;: &#34;1&#34;" in page
    assert "Traceback" in page
    assert "Edit and requeue" not in page
    assert visitor.get("/records/shop/0000ff").status_code == 404
    assert visitor.get("/records/shop/xyz").status_code == 400
    assert visitor.get("/records/elsewhere/00").status_code == 400


@pytest.mark.usefixtures("letters")
def test_a_pending_record_says_what_it_waits_for(visitor: Any) -> None:
    """With an exact tracker the ids that are missing, or that they did not come."""
    text = visitor.log_in("reader").get("/records?state=pending").text
    assert "2 records shown" in text
    (link, *_) = re.findall(r'href="(/records/shop/[0-9a-f]+)"', text)
    assert "What it waits for" in visitor.get(link).text


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("q=not a price", 3),
        ("where=record.id >= 3", 2),
        ("where=record.id >= 2 and operator = parse", 1),
        ("operator=parse&where=record.id = 0 or record.id = 3", 1),
        ("stream=orders/lines", 5),
        ("job=shop:orders", 5),
        ("job=shop:nothing", 0),
        ("root=0000000000000001", 1),
        ("state=waiting", 0),
    ],
)
def test_a_search(visitor: Any, query: str, count: int) -> None:
    """By text, by conditions on fields, by stream, job, root, state; all at once."""
    query = query if "state" in query else f"state=dead&{query}"
    text = visitor.log_in("reader").get(f"/records?{query}").text
    assert len(set(re.findall(r'href="(/records/shop/[0-9a-f]+)"', text))) == count


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize(
    "query",
    [
        "state=odd",
        "where=(",
        "root=xyz",
        "root=12345",
        "after=9.00",
        "after=x",
        "group=x",
        "vertex=elsewhere",
    ],
)
def test_a_search_that_makes_no_sense(visitor: Any, query: str) -> None:
    """It says what is wrong."""
    answer = visitor.log_in("reader").get(f"/records?{query}")
    assert answer.status_code == 400
    assert "That did not work" in answer.text
    name, _, value = query.partition("=")
    if name in ("where", "root"):
        assert f'name="{name}" value="{value}"' in answer.text, "the form has what was written"


def test_pages_together_are_all(visitor: Any, vertex: Any, console: Any) -> None:
    """Each letter once, over as many pages as there are."""
    vertex.open(STREAM)
    vertex.kill(STREAM, [{"id": n} for n in range(120)], "parse", "no")
    console.watch.refresh()
    visitor.log_in("reader")
    found: list[str] = []
    path = "/records?state=dead"
    while path:
        text = visitor.get(path).text
        found += re.findall(r'<a class="mono nowrap" href="(/records/shop/[0-9a-f]+)"', text)
        more = re.search(r'href="([^"]+)" rel="next"', text)
        path = more[1].replace("&amp;", "&") if more else ""
    assert len(found) == len(set(found)) == 120


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize("action", ["requeue", "purge"])
def test_a_group_is_counted_and_then_changed(visitor: Any, vertex: Any, action: str) -> None:
    """Nothing happens before it is confirmed; what dies meanwhile is left alone; pressed twice is once."""
    visitor.log_in("operator")
    group = ids_of(visitor.get("/dead").text)[0]
    plan = visitor.post("/dead/plans", {"action": action, "group": group}).headers["location"]
    text = settled(visitor, plan)
    assert "3 letters" in text
    assert "ValueError" in text
    assert dead(vertex) == 5
    vertex.kill(STREAM, [{"id": 9, "price": "9,5"}], "parse", "ValueError: not a price: 9")
    for _ in range(2):
        assert visitor.post(f"{plan}/{action}").headers["location"] == plan
    assert f"3 of 3 letters {action}d" in settled(visitor, plan)
    assert dead(vertex) == 3
    assert sorted(group.count for group in vertex.call(DeadGroups()).groups) == [1, 2]


@pytest.mark.usefixtures("letters")
def test_a_selection_of_letters(visitor: Any, vertex: Any) -> None:
    """One by one; those that are gone by then are said."""
    visitor.log_in("operator")
    keys = re.findall(r'name="key" value="([^"]+)"', visitor.get("/records?state=dead").text)
    assert len(keys) == 5
    first = visitor.post("/dead/plans", {"action": "purge", "key": keys[:2]}).headers["location"]
    second = visitor.post("/dead/plans", {"action": "purge", "key": keys[1:3]}).headers["location"]
    assert "2 letters" in settled(visitor, first)
    assert "2 letters" in settled(visitor, second)
    visitor.post(f"{first}/purge")
    settled(visitor, first)
    visitor.post(f"{second}/purge")
    assert "1 of 2 letters purged. The others were gone already." in settled(visitor, second)
    assert dead(vertex) == 2


@pytest.mark.usefixtures("letters")
def test_an_export(visitor: Any, vertex: Any) -> None:
    """As lines of JSON or as Parquet, each letter with what is known of it."""
    visitor.log_in("operator")
    groups = ids_of(visitor.get("/dead").text)
    plan = visitor.post("/dead/plans", {"action": "export", "group": groups}).headers["location"]
    assert "5 letters" in settled(visitor, plan)
    answer = visitor.get(f"{plan}/export")
    assert re.search(r'attachment; filename="[^"]+\.jsonl"', answer.headers["content-disposition"])
    letters = [json.loads(line) for line in answer.text.splitlines()]
    assert sorted(letter["record"]["id"] for letter in letters) == [0, 1, 2, 3, 4]
    answer = visitor.get(f"{plan}/export?format=parquet")
    assert re.search(r'attachment; filename="[^"]+\.parquet"', answer.headers["content-disposition"])
    rows = parquet.read_table(io.BytesIO(answer.content)).to_pylist()
    assert {row["key"] for row in rows} == {letter["key"] for letter in letters}
    assert visitor.get(f"{plan}/export?format=csv").status_code == 400
    assert visitor.post(f"{plan}/export").status_code in (400, 405)
    assert dead(vertex) == 5


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize(
    ("search", "found"),
    [
        ("operator=parse", [0, 1, 2]),
        ("where=record.id %3E= 2 and operator = parse", [2]),
        ("q=who", [3, 4]),
        ("", [0, 1, 2, 3, 4]),
    ],
)
def test_all_that_a_search_finds(visitor: Any, vertex: Any, search: str, found: list[int]) -> None:
    """Not what is shown of it alone: exported, and then purged."""
    page = visitor.log_in("operator").get(f"/records?state=dead&{search}").text
    whole = re.search(r'name="filter" value="([^"]+)"', page)
    assert whole is not None
    chosen = {"filter": html.unescape(whole[1])}
    plan = visitor.post("/dead/plans", chosen | {"action": "export"}).headers["location"]
    settled(visitor, plan)
    lines = visitor.get(f"{plan}/export").text.splitlines()
    assert sorted(json.loads(line)["record"]["id"] for line in lines) == found
    plan = visitor.post("/dead/plans", chosen | {"action": "purge"}).headers["location"]
    settled(visitor, plan)
    visitor.post(f"{plan}/purge")
    settled(visitor, plan)
    assert dead(vertex) == 5 - len(found)


@pytest.mark.usefixtures("letters")
def test_a_search_for_a_root_changes_what_is_chosen_alone(visitor: Any, vertex: Any) -> None:
    """A filter does not take the root with it: it would change all letters."""
    visitor.log_in("operator")
    assert 'name="filter"' not in visitor.get("/records?state=dead&root=0000000000000001").text
    answer = visitor.post("/dead/plans", {"action": "purge", "filter": "state=dead&root=0000000000000001"})
    assert answer.status_code == 400
    assert dead(vertex) == 5


@pytest.mark.usefixtures("letters")
def test_a_payload_is_edited(visitor: Any, vertex: Any) -> None:
    """Checked by the types of its columns, shown beside what was, confirmed; then it is in the audit log."""
    visitor.log_in("operator")
    text = visitor.get("/records?state=dead&operator=score").text
    (link, *_) = re.findall(r'href="(/records/shop/[0-9a-f]+)"', text)
    assert "textarea" in visitor.get(f"{link}/edit").text
    for wrong, says in (
        ('{"id": 3', "not JSON"),
        ('{"id": "x", "price": "1"}', "id"),
        ("[]", ""),
        ("{}", "id"),
    ):
        answer = visitor.post(f"{link}/edit", {"payload": wrong, "confirmed": "yes"})
        assert answer.status_code == 400
        assert says in answer.text
    fields = {"payload": '{"id": 3, "price": "17"}'}
    checked = visitor.post(f"{link}/edit", fields).text
    assert "&#34;<del>1</del>&#34;" in checked
    assert "&#34;<ins>17</ins>&#34;" in checked
    assert dead(vertex) == 5
    answer = visitor.post(f"{link}/edit", fields | {"confirmed": "yes"})
    assert answer.headers["location"] == "/dead"
    assert "requeued with its new payload" in visitor.get("/dead").text
    assert dead(vertex) == 4
    assert visitor.get(f"{link}/edit").status_code in (400, 404)
    audit = visitor.log_in("reader").get("/audit").text
    assert "ada@console" in audit
    assert visitor.get(f"{link}/edit").status_code == 403


def test_a_text_of_json_is_shown_and_edited_as_its_structure(visitor: Any, vertex: Any) -> None:
    vertex.open(STREAM)
    vertex.kill(STREAM, [{"value": b'{"a b": [1, 2], "c": "x"}'}], "parse", "ValueError")
    text = visitor.log_in("operator").get("/records?state=dead").text
    link = re.findall(r'href="(/records/shop/[0-9a-f]+)"', text)[0]
    for path in (link, f"{link}/edit"):
        shown = html.unescape(visitor.get(path).text)
        assert '"value": {\n    "json": {\n      "a b": [\n        1,' in shown
    fields = {"payload": '{"value": {"json": {"a b": [1, 3], "c": "x"}}}'}
    checked = html.unescape(visitor.post(f"{link}/edit", fields).text)
    assert 'value (JSON)."a b"[1]' in checked
    assert "<del>2</del>" in checked
    visitor.post(f"{link}/edit", fields | {"confirmed": "yes"})
    (waiting,) = vertex.call(SelectRecords("waiting")).records
    assert waiting.payload.to_pylist() == [{"value": b'{"a b": [1, 3], "c": "x"}'}]


def with_a_point(record: dict[str, Any]) -> object:
    if record["id"] == 4:
        raise KeyError("who")
    return None if record["id"] == 3 else {**record, "price": record["price"].replace(",", ".")}


def test_many_letters_are_edited_by_a_function_that_the_console_was_started_with(
    make_console: Any, vertex: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "console_fixes", SimpleNamespace(point=with_a_point))
    vertex.open(STREAM)
    vertex.kill(STREAM, [{"id": n, "price": f"{n},5"} for n in range(12) if n not in (3, 4)], "parse", SCRIPT)
    vertex.kill(STREAM, [{"id": n, "price": "1"} for n in (3, 4)], "score", "KeyError: 'who'")
    console = make_console(edit_with=("console_fixes:point",))
    console.watch.refresh()
    with TestClient(create_app(console), kit.visitor.origin, follow_redirects=False) as client:
        visitor = kit.visitor(client)
        text = visitor.log_in("operator").get("/dead").text
        assert '<select name="function"><option>console_fixes:point</option></select>' in text
        fields = {"action": "edit", "function": "console_fixes:point", "group": ids_of(text)}
        path = visitor.post("/dead/plans", fields).headers["location"]
        page = settled(visitor, path)
        assert "<strong>10 letters</strong>" in page
        assert "Of 12, 1 stays as it is; the function failed for 1:" in page
        assert "KeyError: &#39;who&#39;" in page
        assert page.count("<tbody>") == 10
        assert "&#34;0<del>,</del>5&#34;" in page
        assert "&#34;0<ins>.</ins>5&#34;" in page
        assert dead(vertex) == 12
        assert visitor.post(f"{path}/requeue").status_code == 400
        visitor.post(f"{path}/edit")
        assert "10 of 10 letters edited and requeued." in settled(visitor, path)
        assert dead(vertex) == 2
        made = visitor.api(
            "operator",
            "POST",
            "/dead/plans",
            json={"action": "edit", "function": "console_fixes:point", "filter": {"where": "record.id = 4"}},
        ).json()
        assert [each["reason"] for each in made["left"]] == ["KeyError: 'who'"]
        for given in ({"function": "os:getcwd"}, {}, {"function": "console_fixes:point2"}):
            refused = visitor.api(
                "operator", "POST", "/dead/plans", json={"action": "edit", "all": True, **given}
            )
            assert (refused.status_code, "console_fixes:point" in refused.text) == (400, True)
        assert visitor.api("reader", "POST", "/dead/plans", json={"action": "edit"}).status_code == 403


@pytest.mark.usefixtures("letters")
def test_a_console_without_functions_edits_no_letters_by_one(visitor: Any, make_console: Any) -> None:
    text = visitor.log_in("operator").get("/dead").text
    assert 'value="edit"' not in text
    refused = visitor.post("/dead/plans", {"action": "edit", "function": "os:getcwd", "group": ids_of(text)})
    assert (refused.status_code, "start the console with --edit-with" in refused.text) == (400, True)
    with pytest.raises(ConfigError, match="edit_with: 'no_such:fix' cannot be imported"):
        make_console(edit_with=("no_such:fix",))


@pytest.mark.usefixtures("letters")
def test_changes_are_in_the_audit_log(visitor: Any) -> None:
    """Who, what, how many; pages go on where they ended."""
    visitor.log_in("operator")
    for group in ids_of(visitor.get("/dead").text):
        plan = visitor.post("/dead/plans", {"action": "purge", "group": group}).headers["location"]
        settled(visitor, plan)
        visitor.post(f"{plan}/purge")
        settled(visitor, plan)
    text = visitor.get("/audit").text
    assert text.count("ada@console") == 2
    assert text.count("purge") == 2
    assert visitor.get("/audit?after=zz").status_code == 400
    assert visitor.get("/audit?vertex=elsewhere").status_code == 400


@pytest.mark.usefixtures("letters")
def test_a_plan_is_its_makers(visitor: Any, clock: Any) -> None:
    """A reader makes none; it is forgotten after ten minutes; it does what it was made for."""
    visitor.log_in("operator")
    group = ids_of(visitor.get("/dead").text)[0]
    plan = visitor.post("/dead/plans", {"action": "requeue", "group": group}).headers["location"]
    settled(visitor, plan)
    assert visitor.post(f"{plan}/purge").status_code == 400
    assert visitor.post(f"{plan}/explode").status_code == 400
    visitor.log_in("reader")
    assert visitor.get(plan).status_code == 403
    assert visitor.post("/dead/plans", {"action": "requeue", "group": group}).status_code == 403
    assert visitor.post(f"{plan}/requeue").status_code == 403
    visitor.log_in("operator")
    clock.move(600_001)
    assert visitor.get(plan).status_code == 404


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize(
    "fields",
    [
        {"action": "explode", "group": "shop:0:orders/lines"},
        {"action": "purge", "group": "shop:x:y"},
        {"action": "purge", "group": "nothing"},
        {"action": "purge", "key": "shop:zz"},
        {"action": "purge", "key": "elsewhere:00"},
        {"action": "purge", "key": "shop:00", "group": "shop:0:orders/lines"},
    ],
)
def test_a_choice_that_makes_no_sense(visitor: Any, vertex: Any, fields: dict[str, str]) -> None:
    """It is refused, and nothing is changed."""
    assert visitor.log_in("operator").post("/dead/plans", fields).status_code == 400
    assert dead(vertex) == 5


@pytest.mark.usefixtures("letters")
@pytest.mark.parametrize("came_from", ["/dead?operator=parse", "/records?state=dead", ""])
def test_nothing_that_is_checked_leads_back(visitor: Any, vertex: Any, came_from: str) -> None:
    """To the page with the boxes, which says so."""
    visitor.log_in("operator")
    origin = visitor.origin
    headers = {"origin": origin, "referer": f"{origin}{came_from}"} if came_from else {"origin": origin}
    fields = {"csrf": visitor.csrf, "action": "purge"}
    answer = visitor.client.post("/dead/plans", data=fields, headers=headers)
    assert answer.status_code == 303
    assert answer.headers["location"].rstrip("?") == (came_from or "/dead")
    assert "Nothing is selected" in visitor.get(answer.headers["location"]).text
    assert dead(vertex) == 5


def test_masked_payloads(make_console: Any, vertex: Any, clock: Any) -> None:
    """Values become types, reasons classes; no export, no search in text."""
    from starlette.testclient import TestClient

    from ftlayer.monitor.console.serve import create_app

    vertex.open(STREAM)
    vertex.kill(STREAM, [{"id": 1, "secret": "Zoë"}], "parse", "ValueError: not a price: Zoë")
    console = make_console(mask_payloads=True)
    console.watch.refresh()
    token = next(user.token for user in (console.users.first,))
    with TestClient(create_app(console), "http://localhost") as client:
        bearer = {"authorization": f"Bearer {token}"}
        for path in ("/dead", "/records?state=dead", "/api/v1/records", "/api/v1/dead/groups"):
            text = client.get(path, headers=bearer).text
            assert "Zo" not in text, path
            assert "ValueError" in text, path
        assert client.get("/records?q=Zo", headers=bearer).status_code == 400
        assert client.get("/api/v1/records?where=record.secret = x", headers=bearer).status_code == 400
        body = {"action": "export", "filter": {}}
        assert client.post("/api/v1/dead/plans", headers=bearer, json=body).status_code == 400


def test_nothing_of_a_record_is_markup(visitor: Any, vertex: Any, console: Any) -> None:
    """Payload, names of columns, reason, operator: text, wherever they are shown."""
    vertex.open(STREAM)
    vertex.kill(STREAM, [{"id": 1, SCRIPT: SCRIPT}], SCRIPT, SCRIPT)
    console.watch.refresh()
    visitor.log_in("operator")
    listed = visitor.get("/records?state=dead").text
    (link, *_) = re.findall(r'href="(/records/shop/[0-9a-f]+)"', listed)
    group = ids_of(visitor.get("/dead").text)[0]
    plan = visitor.post("/dead/plans", {"action": "purge", "group": group}).headers["location"]
    for path in (
        "/dead",
        "/records?state=dead",
        link,
        plan,
        f"/dead?operator={SCRIPT}",
        f"/records?q={SCRIPT}",
    ):
        text = settled(visitor, path)
        assert "<script>alert" not in text, path
        assert "&lt;script&gt;alert" in text, path
