"""The streaming writer of safetensors, and directories that appear whole or not at all."""

import errno
import json
import os
import threading

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from lsjax.convert import directory as directories
from lsjax.convert import writer
from lsjax.convert.cast import cast
from lsjax.convert.directory import replacing
from lsjax.convert.writer import Output, split, write_weights, written_files

BF16 = np.dtype(ml_dtypes.bfloat16)


def outputs(arrays: dict) -> list[Output]:
    return [Output(name, array.shape, array.dtype, lambda array=array: array) for name, array in arrays.items()]


def random_arrays(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return {
        "odd": rng.normal(size=3).astype(BF16),
        "wide": rng.normal(size=(7, 5)),
        "äöü/kernel": rng.normal(size=(11, 13)).astype(np.float32),
        "turned": rng.normal(size=(9, 4)).astype(np.float16).T,
        "every second": rng.normal(size=(8, 6)).astype(np.float32)[::2],
        "empty": np.zeros((0, 3), np.float32),
    }


def assert_same_bits(found: dict, expected: dict) -> None:
    assert found.keys() == expected.keys()
    for name, array in found.items():
        wanted = np.ascontiguousarray(expected[name])
        assert (array.dtype, array.shape) == (wanted.dtype, wanted.shape), name
        assert array.tobytes() == wanted.tobytes(), name


@pytest.mark.parametrize("block_bytes", [1, 60, 8 * 2**20])
def test_safetensors_reads_what_is_streamed(block_bytes, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_BLOCK_BYTES", block_bytes)
    arrays = random_arrays(0)
    blocks = []
    write_weights(tmp_path, split(outputs(arrays), "m.safetensors"), "m.safetensors", {"format": "pt"}, blocks.append)
    assert_same_bits(load_file(tmp_path / "m.safetensors"), arrays)
    assert sum(blocks) == sum(array.nbytes for array in arrays.values())
    with safe_open(tmp_path / "m.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt", "files": '["m.safetensors"]'}
    data = (tmp_path / "m.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    assert size % 8 == 0
    header = json.loads(data[8 : 8 + size])
    del header["__metadata__"]
    end = 0
    for name, entry in header.items():  # without gaps, each at a multiple of its items' size
        start, stop = entry["data_offsets"]
        assert (start, stop - start) == (end, arrays[name].nbytes)
        assert start % arrays[name].itemsize == 0
        end = stop
    assert 8 + size + end == len(data)


def test_shards_hold_what_fits_and_the_index_says_where(tmp_path):
    arrays = {f"t{number}": np.full((number, 10), number, np.float32) for number in range(1, 9)}
    shards = split(outputs(arrays), "model.safetensors", 250)
    assert [[output.name for output in shard.outputs] for shard in shards] == [
        ["t1", "t2", "t3"],
        *([f"t{number}"] for number in range(4, 9)),  # one of them more than 250 bytes: alone
    ]
    write_weights(tmp_path, shards, "model.safetensors", {})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in arrays.values())
    for name, file in index["weight_map"].items():
        np.testing.assert_array_equal(load_file(tmp_path / file)[name], arrays[name])
    assert written_files(tmp_path) == {path.name for path in tmp_path.iterdir()}
    assert len(written_files(tmp_path)) == 7


def test_written_files_are_only_known_where_lsjax_wrote_them(tmp_path):
    from safetensors.numpy import save_file

    save_file({"a": np.zeros(3)}, tmp_path / "a.safetensors")
    assert written_files(tmp_path) == frozenset()
    (tmp_path / "b.safetensors").write_bytes(b"no safetensors")
    assert written_files(tmp_path) == frozenset()


def test_a_dtype_that_is_too_small_is_told_block_by_block(tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "_BLOCK_BYTES", 8)
    large, infinite = np.ones((6, 4), np.float32), np.ones((6, 4), np.float32)
    large[5, 2], infinite[0, 0] = 7e4, np.inf
    found = [
        Output(name, array.shape, np.dtype(np.float16), lambda array=array: array)
        for name, array in {"large": large, "infinite": infinite, "turned": large.T.reshape(4, 6).T}.items()
    ]
    assert write_weights(tmp_path, split(found, "m.safetensors"), "m.safetensors", {}) == ["large", "turned"]


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float16), np.dtype(np.float32)])
def test_a_cast_of_a_transpose_is_numpys(dtype):
    array = np.random.default_rng(1).normal(size=(130, 70)).astype(np.float32)
    copied, overflows = cast(array.T, dtype)
    assert not overflows
    assert copied.flags.c_contiguous
    assert copied.tobytes() == np.ascontiguousarray(array.T.astype(dtype)).tobytes()
    assert cast(array, array.dtype)[0] is array


# Directories.


def listing(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_directory_appears_when_all_is_written(tmp_path):
    target = tmp_path / "a" / "b" / "model"
    with replacing(target, lambda directory: False) as new:
        (new / "x").write_text("1")
        assert not target.exists()
        assert new.parent == target.parent
    assert listing(target) == ["x"]
    assert listing(target.parent) == ["model"]
    with replacing(target, lambda directory: listing(directory) == ["x"]) as new:
        (new / "y").write_text("2")
        assert listing(target) == ["x"]
    assert listing(target) == ["y"]
    assert listing(target.parent) == ["model"]


def fail_within(target, error):
    with replacing(target, lambda directory: True) as new:
        (new / "y").write_text("2")
        raise error


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), ValueError("x"), KeyboardInterrupt()]
)
def test_an_error_leaves_what_was_there(error, tmp_path):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "x").write_text("1")
    for target in (tmp_path / "old", tmp_path / "new" / "deep"):
        with pytest.raises(type(error)) as raised:
            fail_within(target, error)
        if isinstance(error, OSError):
            assert f"{target} cannot be written (No space left on device); nothing was changed" in str(raised.value)
            assert raised.value.errno == errno.ENOSPC
    assert listing(tmp_path) == ["old"]
    assert (tmp_path / "old" / "x").read_text() == "1"


def test_a_rename_that_fails_brings_the_former_contents_back(tmp_path, monkeypatch):
    target = tmp_path / "model"
    target.mkdir()
    (target / "x").write_text("1")
    real = type(target).rename

    def rename(self, other):
        if ".lsjax-" in self.name and not self.name.endswith(".old"):
            raise PermissionError(errno.EACCES, "Permission denied", str(self))
        return real(self, other)

    monkeypatch.setattr(type(target), "rename", rename)
    with (
        pytest.raises(PermissionError, match=r"model cannot be written \(Permission denied\); nothing was changed"),
        replacing(target, lambda directory: True) as new,
    ):
        (new / "y").write_text("2")
    assert listing(tmp_path) == ["model"]
    assert listing(target) == ["x"]


def test_a_parent_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(OSError, match=r"model cannot be written \((Not a directory|File exists)"),
        replacing(tmp_path / "file" / "model", lambda directory: True),
    ):
        pass


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs locks on directories")
def test_only_leftovers_of_dead_writers_of_this_target_are_removed(tmp_path):
    target = tmp_path / "model"
    keep = [
        ".model.backup",
        ".model.lsjax-notes",
        ".other.lsjax-00000000",
        ".modelxlsjax-00000000",
        "model.lsjax-00000000",
    ]
    for name in keep:
        (tmp_path / name).mkdir()
    (tmp_path / ".model.lsjax-aaaaaaaa").write_text("a file")
    (tmp_path / ".model.lsjax-bbbbbbbb").symlink_to(tmp_path / ".model.backup")
    for name in (".model.lsjax-00000000", ".model.lsjax-11111111", ".model.lsjax-11111111.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text(name)
    with replacing(target, lambda directory: (directory / "x").read_text().endswith(".old")) as first:
        assert target.is_dir()  # what a writer killed between its renames had moved away
        with replacing(target, lambda directory: True) as second:
            assert first.is_dir()  # its writer lives
            (second / "y").write_text("")
        assert listing(target) == ["y"]
        (first / "z").write_text("")
    assert listing(target) == ["z"]
    assert listing(tmp_path) == sorted([*keep, ".model.lsjax-aaaaaaaa", ".model.lsjax-bbbbbbbb", "model"])


def test_two_writers_at_once_leave_one_whole_directory(tmp_path):
    ready, errors = threading.Barrier(4), []

    def write(number):
        try:
            with replacing(tmp_path / "model", lambda directory: True) as new:
                (new / "a").write_text(str(number))
                (new / "b").write_text(str(number))
                ready.wait(30)
        except OSError as error:  # another was faster between the two renames
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) < 4
    assert (tmp_path / "model" / "a").read_text() == (tmp_path / "model" / "b").read_text()
    assert [name for name in listing(tmp_path) if not name.endswith(".old")] == ["model"]
    assert directories.check_target(tmp_path / "model", lambda directory: True) is None
