"""Files of dead letters: what is written is read back, once, and what is emptied stays empty."""

from __future__ import annotations

import secrets
from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftlayer.checkpoint.letters import ChainLetter, LetterBatch, LetterKind
from ftlayer.checkpoint.options import CheckpointConfig
from ftlayer.checkpoint.storage import dead_letters as letter_table
from ftlayer.checkpoint.storage.dead_letters import (
    LetterFile,
    LettersInMemory,
    StoredLetters,
    decode_letters,
    encode_letters,
    letters_of,
    parts_of,
    stored_letters,
)
from ftlayer.checkpoint.storage.keys import DIGEST_BYTES, Signer, storage_key
from ftlayer.errors import CheckpointDamagedError, CheckpointStorageError
from ftlayer.vertex.calls import Attempt

KEY = b"k" * 32
TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
WALL = st.integers(0, 1 << 48)

ATTEMPTS = st.builds(Attempt, st.integers(1, 1000), WALL, TEXT, TEXT, TEXT, TEXT)
LETTERS = st.builds(
    ChainLetter,
    st.binary(min_size=16, max_size=16),
    st.integers(1, 1 << 40),
    st.sampled_from(["parse", "count", "sïnk"]),
    st.integers(0, 7),
    st.integers(0, 1),
    st.sampled_from(list(LetterKind)),
    TEXT,
    st.binary(max_size=20),
    st.binary(max_size=200),
    st.none() | st.integers(-(1 << 50), 1 << 50),
    st.lists(ATTEMPTS, max_size=3).map(tuple),
    WALL,
    WALL,
    st.booleans(),
)


def test_files_have_all_fields_of_letters() -> None:
    assert letter_table.LETTERS_SCHEMA.names == [field.name for field in fields(ChainLetter)]
    assert [field.name for field in letter_table.ATTEMPT_TYPE] == [field.name for field in fields(Attempt)]


def letter(number: int, chain: str = "parse", payload: bytes = b"") -> ChainLetter:
    """Return a letter of this number."""
    attempts = (Attempt(1, 5, "ValueError: no", "parse", "slot 0", "Traceback"),)
    name = number.to_bytes(16, "big")
    return ChainLetter(name, 3, chain, 0, 0, LetterKind.RECORD, "parse", b"", payload, None, attempts, 5, 6)


@pytest.fixture(params=["local", "fsspec", "memory"])
def files(request: pytest.FixtureRequest, tmp_path: Path) -> StoredLetters | LettersInMemory:
    """Return the files of a job, in each kind of place."""
    if request.param == "memory":
        return LettersInMemory()
    directory = str(tmp_path) if request.param == "local" else f"memory://letters-{secrets.token_hex(4)}"
    return StoredLetters(directory, "a job/№1", KEY)


def names(parts: list[list[ChainLetter]]) -> list[int]:
    """Return the numbers of letters."""
    return [int.from_bytes(each.letter, "big") for part in parts for each in part]


@given(st.lists(LETTERS, max_size=6).map(tuple), st.booleans())
def test_what_is_written_is_read_back(letters: tuple[ChainLetter, ...], lasting: bool) -> None:
    data = encode_letters(LetterBatch("run-1", letters, lasting), Signer(KEY))
    head, parts = decode_letters(data, "run-1", "here", Signer(KEY))
    assert (head.letters, head.lasting) == (len(letters), lasting)
    assert [each for part in parts for each in letters_of(part)] == sorted(
        letters, key=lambda each: each.chain
    )


def test_any_reader_of_arrow_can_read_it() -> None:
    data = encode_letters(LetterBatch("run-1", (letter(1),)), Signer(KEY))
    with pa.ipc.open_stream(data) as reader:
        assert reader.read_all()["operator"].to_pylist() == ["parse"]


@given(st.data())
def test_damage_is_told(data: st.DataObject) -> None:
    written = encode_letters(LetterBatch("run-1", (letter(1), letter(2))), Signer(KEY))
    at = data.draw(st.integers(0, len(written) - 1))
    damaged = bytearray(written)
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    for read, name in ((bytes(damaged), "run-1"), (written[:at], "run-1"), (written, "run-2")):
        with pytest.raises(CheckpointDamagedError, match="here: these dead letters were cut off or changed"):
            decode_letters(read, name, "here", Signer(KEY))


def test_parts_are_of_one_chain_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letter_table, "PART_LETTERS", 3)
    monkeypatch.setattr(letter_table, "PART_BYTES", 10_000)
    letters = [letter(number, "b" if number % 2 else "a") for number in range(10)]
    letters += [letter(number, "c", b"x" * 6_000) for number in range(10, 13)]
    parts = list(parts_of(tuple(letters)))
    assert [[int.from_bytes(each.letter, "big") for each in part] for part in parts] == [
        [0, 2, 4],
        [6, 8],
        [1, 3, 5],
        [7, 9],
        [10],
        [11],
        [12],
    ]


def test_a_file_is_written_once(files: StoredLetters | LettersInMemory) -> None:
    assert files.found() == []
    assert files.write(LetterBatch("run/1-7", (letter(1), letter(2))))
    assert not files.write(LetterBatch("run/1-7", (letter(3),)))
    assert names(files.read("run/1-7")) == [1, 2]
    assert files.found() == [LetterFile("run/1-7", 2, lasting=False)]


def test_an_emptied_file_stays_and_is_not_written_again(files: StoredLetters | LettersInMemory) -> None:
    files.write(LetterBatch("run-7", (letter(1),), lasting=True))
    files.empty("run-7")
    assert not files.write(LetterBatch("run-7", (letter(1),)))
    assert files.found() == [LetterFile("run-7", 0, lasting=True)]
    assert names(files.read("run-7")) == []
    files.remove("run-7")
    files.remove("run-7")
    assert files.found() == []


def test_purged_letters_are_gone_and_parts_stay_as_many(tmp_path: Path) -> None:
    stored = StoredLetters(str(tmp_path), "job", KEY)
    stored.write(LetterBatch("run-1", (letter(1, "a"), letter(2, "b"), letter(3, "b"))))
    stored.write(LetterBatch("run-10", (letter(4),)))
    some = {letter(number).letter for number in (1, 3)}
    assert stored.purge(some | {letter(9).letter}) == some
    assert [names([part]) for part in stored.read("run-1")] == [[], [2]]
    assert names(stored.read("run-10")) == [4]
    assert stored.purge({letter(1).letter, letter(2).letter}) == {letter(2).letter}
    assert [(file.name, file.letters) for file in stored.found()] == [("run-1", 0), ("run-10", 1)]
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == [
        "run-1.arrow",
        "run-10.arrow",
    ]


def test_who_purges_brings_back_nothing_that_was_emptied_meanwhile(tmp_path: Path) -> None:
    driver, purger = (StoredLetters(str(tmp_path), "job", KEY) for _ in range(2))
    driver.write(LetterBatch("run-1", (letter(1), letter(2))))
    read = purger.read

    def emptied_behind(name: str) -> list[list[ChainLetter]]:
        parts = read(name)
        driver.empty(name)
        return parts

    purger.read = emptied_behind  # type: ignore[method-assign]
    purger.purge({letter(1).letter})
    assert names(driver.read("run-1")) == []
    driver.remove("run-1")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_purge_that_is_damaged_is_told(tmp_path: Path) -> None:
    stored = StoredLetters(str(tmp_path), "job", KEY)
    stored.write(LetterBatch("run-1", (letter(1), letter(2))))
    stored.purge({letter(1).letter})
    (path,) = tmp_path.rglob("*.purged")
    path.write_bytes(path.read_bytes()[1:])
    with pytest.raises(CheckpointDamagedError, match="which letters are purged is not known"):
        stored.read("run-1")


def test_the_letters_of_all_jobs_of_a_directory(tmp_path: Path) -> None:
    config = CheckpointConfig(directory=str(tmp_path))
    for job in ("one", "an/other"):
        stored = StoredLetters(str(tmp_path), job, storage_key(config, job))
        stored.write(LetterBatch("run-1", (letter(len(job)),)))
    found = stored_letters(str(tmp_path))
    assert [(each.job, names(each.read("run-1"))) for each in found] == [("an/other", [8]), ("one", [3])]
    (tmp_path / "one" / "_key").unlink()
    with pytest.raises(CheckpointStorageError, match="no key is kept with it"):
        stored_letters(str(tmp_path))
    assert [each.job for each in stored_letters(str(tmp_path), KEY)] == ["an/other", "one"]


def test_a_foreign_file_is_told_and_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stored = StoredLetters(str(tmp_path), "job", KEY)
    directory = tmp_path / "dead-letters" / "job"
    directory.mkdir(parents=True)
    (directory / "run-1.arrow").write_bytes(b"x" * (DIGEST_BYTES + 8))
    stored.write(LetterBatch("run-2", (letter(1),)))
    assert [file.name for file in stored.found()] == ["run-2"]
    assert "run-1.arrow: this is no file of dead letters" in caplog.text
