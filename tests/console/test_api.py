"""The JSON API: each path for each role, what it refuses, and whatever else is sent to it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer.monitor.sources import VertexSource
from ftlayer.vertex.calls import GetJob, Stats

STREAM = "orders/lines"
READ = (
    "/overview",
    "/vertices",
    "/vertices/shop/hour",
    "/jobs",
    "/jobs/shop:orders",
    "/jobs/shop:orders/hour",
    "/jobs/shop:orders/graph",
    "/jobs/shop:orders/incidents",
    "/jobs/shop:orders/batches",
    "/jobs/shop:orders/checkpoints",
    "/jobs/shop:orders/checkpoints/41",
    "/records",
    "/dead/groups",
    "/audit",
    "/checkpoints",
    "/openapi.json",
)


@pytest.fixture
def shop(visitor: Any, vertex: Any, console: Any, topology: Any) -> Any:
    """A visitor to a console over a job with dead letters."""
    vertex.announce(topology())
    vertex.open(STREAM)
    vertex.kill(STREAM, [{"id": n, "price": "1"} for n in range(3)], "parse", "ValueError: no")
    console.watch.refresh()
    return visitor


def test_each_path_for_each_role(shop: Any) -> None:
    """Who has logged in reads; nobody else does."""
    (item, *_) = shop.api("reader", "GET", "/records").json()["items"]
    record = f"/records/shop/{item['key']}"
    for path in (*READ, record, f"{record}/explain"):
        assert shop.api("", "GET", path).status_code == 401, path
        for role in ("reader", "operator"):
            assert shop.api(role, "GET", path).status_code == 200, path


def test_all_paths_are_tried(shop: Any) -> None:
    """What the OpenAPI has and is not tried here, is tried by name below."""
    paths = shop.api("reader", "GET", "/openapi.json").json()["paths"]
    assert all(path.startswith("/api/v1/") for path in paths)
    read = {path.removeprefix("/api/v1") for path, methods in paths.items() if "get" in methods}
    assert read == {
        "/overview",
        "/vertices",
        "/vertices/{vertex}/hour",
        "/jobs",
        "/jobs/{job}",
        "/jobs/{job}/hour",
        "/jobs/{job}/graph",
        "/jobs/{job}/incidents",
        "/jobs/{job}/batches",
        "/jobs/{job}/checkpoints",
        "/jobs/{job}/checkpoints/{number}",
        "/jobs/{job}/orders/{order}",
        "/records",
        "/records/{vertex}/{key}",
        "/records/{vertex}/{key}/explain",
        "/audit",
        "/checkpoints",
        "/dead/groups",
        "/dead/plans/{plan}",
        "/dead/plans/{plan}/export",
    }


def test_what_it_says(shop: Any) -> None:
    """The fields of the pages."""
    overview = shop.api("reader", "GET", "/overview").json()
    assert overview["vertices"][0]["dead"] == 3
    assert overview["jobs"][0]["job"] == "shop:orders"
    job = shop.api("reader", "GET", "/jobs/shop:orders").json()
    assert job["bottleneck"]["operator"] == "parse"
    groups = shop.api("reader", "GET", "/dead/groups").json()
    assert [(group["operator"], group["count"]) for group in groups["items"]] == [("parse", 3)]
    page = shop.api("reader", "GET", "/records?limit=2").json()
    assert len(page["items"]) == 2
    rest = shop.api("reader", "GET", f"/records?limit=2&after={page['next']}").json()
    assert (len(rest["items"]), rest["next"]) == (1, "")


def test_an_order(shop: Any, vertex: Any) -> None:
    """An operator's token is enough; the same id is the same order; only below the job's own directory."""
    body = {"action": "savepoint", "id": "abc", "directory": "before-upgrade"}
    assert shop.api("", "POST", "/jobs/shop:orders/orders", json=body).status_code in (401, 403)
    assert shop.api("reader", "POST", "/jobs/shop:orders/orders", json=body).status_code == 403
    for _ in range(2):
        answer = shop.api("operator", "POST", "/jobs/shop:orders/orders", json=body)
        assert (answer.status_code, answer.json()["state"]) == (202, "waiting")
    (record,) = vertex.call(GetJob("orders")).orders
    assert record.order.directory == "/savepoints/before-upgrade"
    assert shop.api("reader", "GET", "/jobs/shop:orders/orders/abc").json()["by"] == "ada@console"
    assert shop.api("reader", "GET", "/jobs/shop:orders/orders/other").status_code == 404


@pytest.mark.parametrize(
    "directory", ["/etc/cron.d", "../x", "/savepoints/../x", "s3://other/x", "a\\b", "/savepoints/"]
)
def test_a_savepoint_elsewhere_is_refused(shop: Any, vertex: Any, directory: str) -> None:
    """A browser does not choose where a driver writes."""
    body = {"action": "savepoint", "directory": directory}
    answer = shop.api("operator", "POST", "/jobs/shop:orders/orders", json=body)
    assert (answer.status_code, answer.json()["error"]) == (400, "CONFIG")
    assert vertex.call(GetJob("orders")).orders == ()


def test_a_plan(shop: Any, vertex: Any) -> None:
    """A dry run, then the change; by groups, keys, or a filter."""
    (group,) = shop.api("reader", "GET", "/dead/groups").json()["items"]
    chosen = {"vertex": "shop", "group": group["group"], "stream": group["stream_id"]}
    body = {"action": "purge", "groups": [chosen]}
    assert shop.api("reader", "POST", "/dead/plans", json=body).status_code == 403
    plan = _settled(shop, shop.api("operator", "POST", "/dead/plans", json=body).json())
    assert (plan["state"], plan["count"]) == ("counted", 3)
    assert plan["groups"][0]["operator"] == "parse"
    body = {"action": "purge", "filter": {"where": "record.id = 1"}}
    one = _settled(shop, shop.api("operator", "POST", "/dead/plans", json=body).json())
    assert one["count"] == 1
    assert shop.api("reader", "POST", f"/dead/plans/{one['plan']}/purge").status_code == 403
    assert shop.api("operator", "POST", f"/dead/plans/{one['plan']}/requeue").status_code == 400
    done = _settled(shop, shop.api("operator", "POST", f"/dead/plans/{one['plan']}/purge").json())
    assert (done["state"], done["changed"]) == ("done", 1)
    done = _settled(shop, shop.api("operator", "POST", f"/dead/plans/{plan['plan']}/purge").json())
    assert (done["state"], done["changed"]) == ("done", 2)
    assert vertex.call(Stats()).values["dead_letters"] == 0


@pytest.mark.parametrize("chosen", [{"filter": {}}, {"filter": {"where": ""}}, {}])
def test_all_letters_have_to_be_meant(shop: Any, chosen: dict[str, Any]) -> None:
    """A script whose filter comes out empty purges nothing; "all" says that it is meant."""
    body = {"action": "purge"} | chosen
    answer = shop.api("operator", "POST", "/dead/plans", json=body)
    assert (answer.status_code, "nothing was chosen" in answer.json()["message"]) == (400, True)
    plan = _settled(shop, shop.api("operator", "POST", "/dead/plans", json=body | {"all": True}).json())
    assert plan["count"] == 3


@pytest.mark.parametrize(
    "wanted", [{"all": True}, {"filter": {"where": "record.id >= 1"}}, {"filter": {"operator": "parse"}}]
)
def test_groups_of_a_plan_are_of_what_was_counted(shop: Any, vertex: Any, wanted: dict[str, Any]) -> None:
    """Not of an earlier look: what is confirmed is one number, or one number without groups."""
    vertex.kill(STREAM, [{"id": n} for n in range(7, 9)], "parse", "ValueError: later")
    body = {"action": "purge"} | wanted
    plan = _settled(shop, shop.api("operator", "POST", "/dead/plans", json=body).json())
    groups = [group["count"] for group in plan["groups"]]
    assert sum(groups) in (plan["count"], 0)
    if "where" in str(wanted):
        assert groups


def _settled(shop: Any, plan: dict[str, Any]) -> dict[str, Any]:
    for _ in range(1_000):
        if plan["state"] not in ("counting", "changing"):
            return plan
        plan = shop.api("operator", "GET", f"/dead/plans/{plan['plan']}").json()
    raise AssertionError(plan)


def test_an_edit(shop: Any, vertex: Any) -> None:
    """By an operator, by the types of the columns; it is in the audit log."""
    (item, *_) = shop.api("reader", "GET", "/records").json()["items"]
    path = f"/records/shop/{item['key']}/payload"
    assert shop.api("reader", "PUT", path, json={"id": 7, "price": "2"}).status_code == 403
    answer = shop.api("operator", "PUT", path, json={"id": "seven", "price": "2"})
    assert answer.status_code == 400
    assert "id" in answer.json()["message"]
    assert vertex.call(Stats()).values["dead_letters"] == 3
    answer = shop.api("operator", "PUT", path, json={"id": 7, "price": "2"})
    assert (answer.status_code, answer.json()) == (200, {"changed": 1})
    assert vertex.call(Stats()).values["dead_letters"] == 2
    assert shop.api("operator", "PUT", path, json={"id": 7, "price": "2"}).status_code in (400, 404)
    (entry,) = shop.api("reader", "GET", "/audit").json()["items"]
    assert (entry["who"], entry["count"]) == ("ada@console", 1)


def test_a_cookie_needs_the_token_of_the_forms(shop: Any, vertex: Any) -> None:
    """A page of another site cannot send the header."""
    shop.log_in("operator")
    origin = {"origin": shop.origin}
    body = {"action": "drain"}
    path = "/api/v1/jobs/shop:orders/orders"
    assert shop.client.post(path, json=body, headers=origin).status_code == 403
    assert vertex.call(GetJob("orders")).orders == ()
    headers = origin | {"x-csrf-token": shop.csrf}
    assert shop.client.post(path, json=body, headers=headers).status_code == 202


@pytest.mark.parametrize(
    ("method", "path", "body", "message", "what_to_do"),
    [
        ("GET", "/records?limit=x", None, "limit: 'x' is not taken", "limit should be a valid integer"),
        ("GET", "/audit?limit=0", None, "limit: '0' is not taken", "limit should be greater than"),
        ("POST", "/dead/plans", "{}", "action is missing", "send action"),
        ("POST", "/dead/plans", '{"action": "purge", "x": 1}', "there is no field x", "leave it out"),
        ("POST", "/dead/plans", "{,", "the body is no JSON", "send one JSON object"),
        ("POST", "/dead/plans", "", "the body is missing", "send the body"),
        ("POST", "/dead/plans", "[1]", "the body is no JSON object", "send one, with 'Content-Type"),
    ],
)
def test_a_request_of_the_wrong_shape_says_what_to_do(
    shop: Any, method: str, path: str, body: str | None, message: str, what_to_do: str
) -> None:
    """In the words of the field that is wrong."""
    shop.client.headers["content-type"] = "application/json"
    answer = shop.api("operator", method, path, content=body)
    assert (answer.status_code, answer.json()["error"]) == (400, "MALFORMED")
    assert answer.json()["message"].startswith(message)
    assert answer.json()["what_to_do"].startswith(what_to_do)


def test_errors_say_what_to_do(shop: Any) -> None:
    """Code, message, and the rest of the sentence."""
    answer = shop.api("reader", "GET", "/jobs/shop:nothing")
    assert (answer.status_code, answer.json()["error"]) == (404, "UNKNOWN_JOB")
    answer = shop.api("reader", "GET", "/jobs/elsewhere:orders")
    assert answer.status_code == 400
    assert answer.json()["what_to_do"]
    answer = shop.api("operator", "POST", "/jobs/shop:orders/orders", json={"action": "drain", "odd": 1})
    assert (answer.status_code, answer.json()["error"]) == (400, "MALFORMED")
    assert shop.api("operator", "POST", "/overview").status_code == 405


texts = st.text(max_size=40) | st.sampled_from(
    [
        "shop",
        "shop:orders",
        "orders",
        STREAM,
        "0",
        "-1",
        "dead",
        "pending",
        "purge",
        "%00",
        "..",
        "a:b:c",
        "00" * 20,
    ]
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=8,
)
names = st.sampled_from(
    [
        "action",
        "slot",
        "id",
        "run",
        "directory",
        "timeout",
        "groups",
        "keys",
        "filter",
        "vertex",
        "group",
        "where",
    ]
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_sent(shop: Any, data: st.DataObject) -> None:
    """Any path with anything in it, any body: an answer below 500, and JSON that says what is wrong."""
    paths = shop.api("reader", "GET", "/openapi.json").json()["paths"]
    template = data.draw(st.sampled_from(sorted(paths)))
    method = data.draw(st.sampled_from(sorted(paths[template])))
    path = template.removeprefix("/api/v1")
    for parameter in ("job", "vertex", "key", "plan", "action", "order", "number"):
        if f"{{{parameter}}}" in path:
            path = path.replace(f"{{{parameter}}}", _quoted(data.draw(texts)))
    query = {
        parameter["name"]: data.draw(texts)
        for parameter in paths[template][method].get("parameters", ())
        if parameter["in"] == "query" and data.draw(st.booleans())
    }
    options: dict[str, Any] = {"params": query}
    if method in ("post", "put"):
        options["json"] = data.draw(st.dictionaries(names, values, max_size=4) | values)
    answer = shop.api("operator", method.upper(), path, **options)
    assert answer.status_code < 500, (path, options, answer.text)
    if answer.status_code >= 400 and answer.request.url.path.startswith("/api/"):  # ".." leads elsewhere
        assert set(answer.json()) == {"error", "message", "what_to_do"}


def _quoted(text: str) -> str:
    from urllib.parse import quote

    return quote(text, safe="") or "-"


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/records?wheer=age", "there is no option 'wheer': did you mean 'where'"),
        ("/records?state=dead&bogus=1", "there is no option 'bogus'"),
        ("/dead/groups?vertex=nope", "no vertex is called 'nope'"),
        ("/overview?limit=3", "there is no option 'limit'"),
    ],
)
def test_a_parameter_that_there_is_not_lists_nothing(shop: Any, path: str, said: str) -> None:
    """One that is misspelled would list all."""
    answer = shop.api("reader", "GET", path)
    assert answer.status_code == 400
    assert said in answer.json()["message"]


def test_letters_of_a_program_that_has_ended_are_said_to_be_there(
    shop: Any, console: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(VertexSource, "refreshed", lambda source: None)
    console.watch.refresh()
    for _ in range(2):
        found = shop.api("reader", "GET", "/dead/groups").json()
        assert found["items"] == []
        (trouble,) = found["troubles"]
        assert "has ended, and 3 dead letters are in its store" in trouble
        assert "3 dead letters are in its store" in shop.log_in("reader").get("/dead").text
        console.watch.refresh()
