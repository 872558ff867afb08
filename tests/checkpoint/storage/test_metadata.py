"""Metadata files and keys: nothing but what was written with the same key is taken."""

from __future__ import annotations

import dataclasses
import os
import secrets
import struct
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ftlayer import __version__
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.snapshots import (
    ChannelState,
    Committable,
    OperatorInfo,
    OperatorState,
    Piece,
    Redistribution,
)
from ftlayer.checkpoint.storage.keys import DIGEST_BYTES, Signer, key_of, storage_key
from ftlayer.checkpoint.storage.layout import new_savepoint
from ftlayer.checkpoint.storage.loading import HEADER_BYTES, decode, encode, load_checkpoint, read_header
from ftlayer.checkpoint.storage.opening import driver_storage
from ftlayer.errors import CheckpointDamagedError, CheckpointStorageError, IncompatibleCheckpointError

SIGNER = Signer(b"k" * 32)


@pytest.fixture
def full(made: Any) -> Any:
    """A checkpoint with something in every field."""
    piece = Piece(b"d" * 32, 3, b"abc")
    in_file = Piece(b"e" * 32, 300_000, None, "shared/0-1-a-1.1.u", 17)
    subtask = dataclasses.replace(
        made.subtask([piece, in_file]),
        operators=(OperatorState("count", "list", Redistribution.UNION, (b"1", b"2")),),
        positions={"0": b"\x00\xff"},
        committables=(Committable("sink", b"m", 3),),
        channels=(ChannelState("a", "", "b", 0, 0, 1, False, piece, 4),),
    )
    checkpoint = made.checkpoint(7, subtask)
    info = OperatorInfo("count", "chain", "process", 2, ("bigint",))
    return dataclasses.replace(checkpoint, operators=(info,), sources={"s": b"p"}, unaligned=True)


def test_what_is_encoded_is_decoded(full: Any) -> None:
    found = decode(encode(full, SIGNER), "/somewhere", SIGNER)
    assert found == dataclasses.replace(full, location="/somewhere")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200, deadline=None)
@given(st.data())
def test_a_file_that_was_cut_or_changed_is_refused(full: Any, data: st.DataObject) -> None:
    content = encode(full, SIGNER)
    place = data.draw(st.integers(0, len(content) - 1))
    if data.draw(st.booleans()):
        changed = content[:place]
    else:
        flipped = content[place] ^ data.draw(st.integers(1, 255))
        changed = content[:place] + bytes([flipped]) + content[place + 1 :]
    with pytest.raises((CheckpointDamagedError, IncompatibleCheckpointError)):
        decode(changed, "/somewhere", SIGNER)


def test_another_key_is_refused(full: Any) -> None:
    with pytest.raises(CheckpointDamagedError, match="another key"):
        decode(encode(full, SIGNER), "/somewhere", Signer(b"l" * 32))


def test_long_keys_count_in_full() -> None:
    assert Signer(b"k" * 100).digest(b"") != Signer(b"k" * 64).digest(b"")


def test_pieces_and_metadata_have_different_checksums() -> None:
    assert SIGNER.digest(b"abc") != SIGNER.metadata(b"abc")


def test_a_newer_format_is_no_damage(full: Any) -> None:
    content = bytearray(encode(full, SIGNER))
    content[8:10] = struct.pack(">H", 9)
    with pytest.raises(
        IncompatibleCheckpointError, match=f"format 9, written by ftlayer {__version__}; .*reads format 1"
    ):
        decode(bytes(content), "/somewhere", SIGNER)


@pytest.mark.parametrize("plain", [{}, {"checkpoint": "x"}, 7])
def test_signed_nonsense_is_refused(plain: Any, full: Any) -> None:
    header, body = encode(full, SIGNER)[:HEADER_BYTES], msgpack.packb(plain)
    with pytest.raises(CheckpointDamagedError, match="makes no sense"):
        decode(header + SIGNER.metadata(header + body) + body, "/somewhere", SIGNER)


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "shared/../../x", "chk-1/../x", "x", "shared/./x", "shared/a/b", ""]
)
def test_paths_lead_nowhere_else(path: str, made: Any) -> None:
    checkpoint = made.checkpoint(1, made.subtask([Piece(b"d" * 32, 1, None, path)]))
    with pytest.raises(CheckpointDamagedError, match="not in the checkpoint's directory"):
        decode(encode(checkpoint, SIGNER), "/somewhere", SIGNER)


def test_headers_are_read_without_the_rest(full: Any) -> None:
    header = read_header(encode(full, SIGNER)[:HEADER_BYTES])
    assert header is not None
    assert (header.checkpoint, header.completed_ms) == (7, full.completed_ms)
    assert read_header(b"x" * 100) is None
    assert len(encode(full, SIGNER)) > HEADER_BYTES + DIGEST_BYTES


# ---------------------------------------------------------------- keys


def test_a_jobs_key_is_made_once_for_its_owner(tmp_path: Path) -> None:
    config = CheckpointConfig(directory=str(tmp_path / "new" / "dir"))
    key = storage_key(config, "job")
    assert storage_key(config, "job") == key
    assert storage_key(config, "other") != key
    file = tmp_path / "new" / "dir" / "job" / "_key"
    assert file.stat().st_mode & 0o777 == 0o600
    assert os.listdir(file.parent) == ["_key"]
    file.write_bytes(b"short")
    with pytest.raises(CheckpointDamagedError, match="neither copy"):
        storage_key(config, "job")


def test_a_given_key_is_not_written_down(tmp_path: Path, made: Any) -> None:
    config = CheckpointConfig(directory=str(tmp_path), key=secrets.token_bytes(32))
    key = storage_key(config, "job")
    assert key == config.key
    driver = driver_storage(config, "job", "run", key)
    checkpoint = driver.publish(made.checkpoint(1))
    location = new_savepoint(str(tmp_path), "run")
    driver.publish(made.checkpoint(2, savepoint=True), location)
    assert not list(tmp_path.rglob("_key"))
    with pytest.raises(CheckpointStorageError, match="give the same key"):
        load_checkpoint(checkpoint.location)
    assert load_checkpoint(checkpoint.location, key) == checkpoint
    with pytest.raises(CheckpointDamagedError, match="another key"):
        load_checkpoint(checkpoint.location, b"x" * 32)


def test_a_kept_key_does_not_pass_for_a_given_one(tmp_path: Path, made: Any) -> None:
    """Who can write beside the checkpoints can sign them with a key of his own, and put that beside them."""
    theirs = driver_storage(CheckpointConfig(directory=str(tmp_path)), "job", "run", b"t" * 32)
    forged = theirs.publish(made.checkpoint(1))
    (tmp_path / "job" / "_key").write_bytes(b"t" * 32)
    ours = CheckpointConfig(directory=str(tmp_path), key=b"o" * 32)
    with pytest.raises(CheckpointDamagedError, match="another key"):
        driver_storage(ours, "job", "run", b"o" * 32).load(forged.location)
    assert key_of(str(tmp_path / "job" / "run"), b"o" * 32) == b"o" * 32


def test_a_url_that_is_no_checkpoint_names_those_below(tmp_path: Path, made: Any) -> None:
    config = CheckpointConfig(directory=str(tmp_path))
    driver = driver_storage(config, "job", "run", storage_key(config, "job"))
    with pytest.raises(CheckpointStorageError, match="no checkpoint or savepoint here"):
        load_checkpoint(str(tmp_path / "job"))
    for number in (2, 10, 9):
        driver.publish(made.checkpoint(number))
    (tmp_path / "job" / "run" / "chk-11").mkdir()
    with pytest.raises(CheckpointStorageError, match=r"chk-10, .*chk-9, .*chk-2$"):
        load_checkpoint(str(tmp_path / "job"))


def test_checkpoints_of_all_runs_the_latest_first(tmp_path: Path, made: Any) -> None:
    config = CheckpointConfig(directory=str(tmp_path))
    key = storage_key(config, "job")
    one, two = (driver_storage(config, "job", run, key) for run in ("run-1", "run-2"))
    published = [
        one.publish(made.checkpoint(5)),
        two.publish(dataclasses.replace(made.checkpoint(3), completed_ms=9_000_000)),
        one.publish(made.checkpoint(6)),
    ]
    found = [driver.completed("job") for driver in (one, two)]
    assert found[0] == found[1] == [published[1].location, published[2].location, published[0].location]
    one.close([])
    assert two.completed("job") == [published[1].location]
