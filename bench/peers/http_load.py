"""Sends requests over some connections for some seconds, each connection the next one when the last is answered.

`python -m bench.peers.http_load PORT SECONDS` prints ``requests a second, median and 99th percentile of answers in ms``
as JSON. Raw sockets of asyncio: a client library would take longer than the server.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

CONNECTIONS = 64
BODY = b'{"user": "somebody", "page": "/somewhere/else", "took_ms": 17, "ok": true}'
REQUEST = (
    b"POST /clicks HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b"
    % (len(BODY), BODY)
)


async def connection(port: int, end: float, took: list[float]) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    while time.monotonic() < end:
        begun = time.monotonic()
        writer.write(REQUEST)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not head.startswith(b"http/1.1 202"):
            raise RuntimeError(f"answered {head!r}")
        await reader.readexactly(int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0]))
        took.append(time.monotonic() - begun)
    writer.close()


async def load(port: int, seconds: float) -> dict[str, float]:
    took: list[float] = []
    begun = time.monotonic()
    await asyncio.gather(*(connection(port, begun + seconds, took) for _ in range(CONNECTIONS)))
    rate = len(took) / (time.monotonic() - begun)
    took.sort()
    return {
        "per_s": rate,
        "median_ms": took[len(took) // 2] * 1e3,
        "p99_ms": took[len(took) * 99 // 100] * 1e3,
    }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(load(int(sys.argv[1]), float(sys.argv[2])))))
