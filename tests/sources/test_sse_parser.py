"""The parser of Server-Sent Events, against the HTML standard's rules said in another way."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.connectors.http.pull import ServerEvent, SseParser
from ftlayer.errors import SourceError


def parsed(*parts: bytes, last_id: str = "") -> list[ServerEvent]:
    parser = SseParser(last_id=last_id)
    parser.begin()
    return [event for part in parts for event in parser.feed(part)]


def by_the_standard(stream: bytes) -> list[ServerEvent]:
    """All at once, as text: line by line, as 9.2.6 has it."""
    text = stream.decode("utf-8", "replace").removeprefix("\ufeff")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    *lines, _ = text.split("\n")
    events, data, kind, last = [], "", "", ""
    for line in lines:
        if line == "":
            if data:
                events.append(ServerEvent(last, kind or "message", data[:-1]))
            if data == "\n":
                events.pop()
            data = kind = ""
            continue
        if line.startswith(":"):
            continue
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            data += value + "\n"
        elif name == "event":
            kind = value
        elif name == "id" and "\0" not in value:
            last = value
    return events


PIECES = st.sampled_from(
    [
        *(b"data", b"id", b"event", b"retry", b":", b": ", b" ", b"\n", b"\r", b"\r\n", b"x", b"7", b"\0"),
        *(b"\xff", "ä".encode(), b"data: ", b"id: 1\n", b"\n\n", b"\xef\xbb\xbf"),
    ]
)


@given(pieces=st.lists(PIECES, max_size=40), cuts=st.lists(st.integers(0, 80), max_size=6))
def test_bytes_cut_anywhere(pieces: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(pieces)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    parts = [stream[begin:end] for begin, end in pairwise(places)]
    assert parsed(*parts) == parsed(stream) == by_the_standard(stream)


def test_the_examples_of_the_standard() -> None:
    assert parsed(b"data: YHOO\ndata: +2\ndata: 10\n\n") == [ServerEvent("", "message", "YHOO\n+2\n10")]
    stream = b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event\n\n"
    assert parsed(stream) == [
        ServerEvent("1", "message", "first event"),
        ServerEvent("", "message", "second event"),
        ServerEvent("", "message", " third event"),
    ]
    assert parsed(b"data:test\n\ndata: test\n\n") == [ServerEvent("", "message", "test")] * 2
    assert parsed(b"event: add\ndata: 73857293\n") == [], "it is not complete"


def test_an_id_lasts_until_another_one_comes() -> None:
    events = parsed(b"id: 7\ndata: a\n\ndata: b\n\nid: x\0\ndata: c\n\n", last_id="6")
    assert [event.last_id for event in events] == ["7", "7", "7"]
    assert [event.last_id for event in parsed(b"data: a\n\n", last_id="6")] == ["6"]


def test_what_a_connection_has_left_is_nothing() -> None:
    parser = SseParser()
    parser.begin()
    assert len(parser.feed(b"id: 1\ndata: a\n\nid: 2\ndata: b\n")) == 1
    parser.begin()
    assert parser.feed(b"\n") == []
    assert parser.last_id == "1", "the second one did not come"
    assert parser.feed(b"data: c\n\n") == [ServerEvent("1", "message", "c")]


def test_the_pause_that_the_server_wants() -> None:
    parser = SseParser()
    parser.begin()
    parser.feed(b"retry: soon\nretry: 1500\nretry: -1\n")
    assert parser.retry_ms == 1_500
    parser.feed(b"retry: 86400001\nretry: " + b"9" * 5_000 + b"\n")
    assert parser.retry_ms == 1_500, "neither raises nor waits for ever"
    parser.feed(b"retry: " + b"0" * 5_000 + b"86400000\n")
    assert parser.retry_ms == 86_400_000


def test_an_event_without_an_end_is_refused() -> None:
    parser = SseParser(max_bytes=100)
    parser.begin()
    parser.feed(b"data: x\n\n" * 100)
    for _ in range(10):
        parser.feed(b"data: more\n")
    with pytest.raises(SourceError, match="more than 100 bytes"):
        parser.feed(b"data: more\n")
