"""A new call is two edits: its class, which says what kind it is and where it goes, and the method that answers it."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

import pytest

from ftlayer.common.clock import Now, system_now
from ftlayer.errors import MalformedRequestError, VertexError
from ftlayer.vertex import calls
from ftlayer.vertex.rules.layer import FTLayerCore, Status
from ftlayer.vertex.rules.state import LayerOptions
from ftlayer.vertex.service.shard import ShardParts
from ftlayer.vertex.service.vertex import Vertex
from ftlayer.vertex.store import MemoryStore
from ftlayer.vertex.wire.frames import decode_call, encode_call


def test_its_class_and_its_method_are_all(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True, slots=True)
    class Sizes(calls.ReadingCall, calls.AnsweredBy["SizesTold"], route=calls.Route.STREAM):
        stream: str

    @dataclass(frozen=True, slots=True)
    class SizesTold(calls.Reply):
        stream: str
        wall_ms: int

    @calls.handles(Sizes)
    def sizes(status: Status, txn: Any, call: Sizes, now: Now) -> SizesTold:
        return SizesTold(call.stream, now.wall_ms)

    try:
        monkeypatch.setattr(Status, "sizes", sizes, raising=False)
        call, envelope = decode_call(encode_call(Sizes("s"), None))
        assert (call, envelope) == (Sizes("s"), None)
        with pytest.raises(MalformedRequestError, match=r"Sizes\.stream: expected 1 to"):
            decode_call(encode_call(Sizes(""), None))
        parts = ShardParts(MemoryStore, lambda store, now: FTLayerCore(store, LayerOptions(), now), 1_000)
        vertex = Vertex(tmp_path, [parts, parts], lambda error: None)
        answers: list[Any] = []
        answered = threading.Event()
        vertex.submit(call, None, lambda reply: (answers.append(reply), answered.set())[-1])
        assert answered.wait(60)
        vertex.close()
        assert type(call.expected(answers[0])) is SizesTold
        assert 0 < answers[0].wall_ms <= system_now().wall_ms
    finally:
        calls.CALLS.pop("Sizes", None)
        calls.REPLIES.pop("SizesTold", None)


def test_each_call_says_where_it_goes_and_is_answered() -> None:
    layer = FTLayerCore(MemoryStore(), LayerOptions(), system_now())
    assert layer._handlers.keys() == set(calls.CALLS.values())
    for kind in calls.CALLS.values():
        assert issubclass(kind, calls.ReadingCall) is not issubclass(kind, calls.MutatingCall)
        fields = {*kind.__dataclass_fields__, *vars(kind)}
        assert kind.reply_name in calls.REPLIES, kind
        assert kind.route is calls.Route.ALL or kind.route.value in fields, kind


def test_another_calls_reply_is_an_error_that_names_both() -> None:
    with pytest.raises(VertexError, match="Stats: the vertex, or board, answered Changed, and StatsReply"):
        calls.Stats().expected(calls.Changed(1))
