"""Damage for the tests of hostile input: seeded mutations of real files, and what loading them may do."""

import json
import tracemalloc

import pytest

from lsjax.convert.checkpoint import CheckpointError
from lsjax.io import load

# What a mutation puts where a JSON value was.
ODD = [
    None, True, -1, 0, 1, 2, 2**31, 2**63, 2**64, 10**400, 0.5, 1e-320, 1e300, "", "x", "\ud800", "../..", "\x00",
    [], [[]], [0] * 100, {}, {"rope_type": "linear"}, {"": None},
]  # fmt: skip


def fails(path, words="", open_it=load) -> list[str]:
    """The lines of the one error that loading this gives; one of them has ``words``."""
    with pytest.raises(CheckpointError) as error:
        open_it(path)
    assert str(error.value).startswith(f"cannot load {path}")
    assert any(words in line for line in error.value.problems), (words, error.value.problems)
    return list(error.value.problems)


def loads_or_fails(path, open_it=load) -> bool:
    """Whether it was refused; whatever else happens is an error."""
    try:
        open_it(path)
    except CheckpointError as error:
        lines = error.problems
    else:
        return False
    assert lines
    assert all(line.isprintable() for line in lines)
    return True


def peak_memory(function, *args) -> int:
    """Bytes that Python allocates at most while this runs."""
    tracemalloc.start()
    try:
        function(*args)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def truncate(rng, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def flip(rng, data: bytes, end: int) -> bytes:
    """One to three bits before ``end`` turned."""
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        damaged[rng.randrange(end)] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def splice(rng, data: bytes, end: int) -> bytes:
    """Some bytes before ``end`` moved elsewhere, doubled or left out."""
    start, to, size = rng.randrange(end), rng.randrange(end), rng.randint(1, 40)
    part = data[start : start + size] * rng.randint(0, 2)
    return data[:to] + part + data[to + rng.choice([0, size]) :]


def mutate_json(rng, data: bytes) -> bytes:
    """One value somewhere exchanged for an odd one, or one key renamed or left out."""
    value = json.loads(data)
    node, places = value, []
    while isinstance(node, dict | list) and node and (not places or rng.random() < 0.7):
        key = rng.choice(list(node)) if isinstance(node, dict) else rng.randrange(len(node))
        places.append((node, key))
        node = node[key]
    if not places:
        return json.dumps(rng.choice(ODD)).encode()
    node, key = places[-1]
    if isinstance(node, dict) and rng.random() < 0.3:
        found = node.pop(key)
        if rng.random() < 0.5:
            node[str(key) + rng.choice(["", "\x00", "é", ".weight"])] = found
    else:
        node[key] = rng.choice(ODD)
    return json.dumps(value).encode()
