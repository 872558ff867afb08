"""Memory that was freed goes back to the system."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import ctypes, resource
from ftlayer.vertex.service.heap import give_back_freed_memory, keep_freed_memory

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
before = resident()
# As gRPC reads a large message: in pieces, of which a few stay.
pieces = [libc.malloc(65_536) for _ in range(8_000)]
for piece in pieces:
    ctypes.memset(piece, 1, 65_536)
for index, piece in enumerate(pieces):
    if index % 100:
        libc.free(piece)
kept = resident() - before
given = give_back_freed_memory(most_bytes=64 << 20)
print(kept, resident() - before, given, give_back_freed_memory(most_bytes=4 << 30))
"""


def test_pieces_that_were_freed_are_given_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    kept, left, given, again = done.stdout.split()
    assert (given, again) == ("True", "False")
    assert int(kept) > 400 << 20
    assert int(left) < int(kept) / 4
