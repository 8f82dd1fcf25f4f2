"""The instruments: times taken in turns, on a clock of the tests' own; bytes against a count by hand."""

import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from support import random_params

import lsjax
from lsjax.measure import bandwidth, memory, timing
from lsjax.measure.timing import Spread, Timing, Timings, time_in_turns


class Machine:
    """Calls that take given times on a clock that only they move, and a record of what happened."""

    def __init__(self, **seconds: list[float]) -> None:
        self.now, self.log = 100.0, []
        self.seconds = {name: iter(times) for name, times in seconds.items()}

    def call(self, name: str):
        def run():
            self.log.append(name)
            self.now += next(self.seconds[name])
            return f"{name} at {self.now}"

        return run

    def time(self, **options) -> Timings:
        return time_in_turns({name: self.call(name) for name in self.seconds}, clock=lambda: self.now, **options)


def test_calls_are_timed_in_turns_after_warm_up():
    machine = Machine(plain=[9, 2, 4, 3], drafted=[20, 1, 1, 6])
    seen = []

    def progress(name, repetition):
        seen.append((name, repetition))
        machine.now += 50  # not timed

    found = machine.time(repetitions=3, progress=progress)
    assert machine.log == ["plain", "drafted"] * 4
    assert seen == [(name, repetition) for repetition in range(4) for name in ("plain", "drafted")]
    assert list(found) == ["plain", "drafted"]
    plain, drafted = found["plain"], found["drafted"]
    assert (plain.first_seconds, plain.seconds.values, plain.median, plain.compile_seconds) == (9, (2, 4, 3), 3, 6)
    assert (drafted.first_seconds, drafted.seconds.values, drafted.median) == (20, (1, 1, 6), 1)
    assert (plain.result, drafted.result) == ("plain at 159.0", "drafted at 229.0")
    assert found.ratio("plain", "drafted").values == (2, 4, 0.5)
    assert found.ratio("plain", "drafted").median == 2  # not the ratio of medians, 3


def test_more_warm_ups_count_as_none():
    machine = Machine(a=[5, 7, 1], b=[6, 8, 2])
    found = machine.time(repetitions=1, warm_ups=2)
    assert machine.log == ["a", "b"] * 3
    assert [(t.first_seconds, t.seconds.values) for t in found.values()] == [(5, (1,)), (6, (2,))]


def test_totals_are_sums_of_each_repetition():
    found = Machine(a=[5, 1, 2], b=[6, 10, 20], c=[1, 1, 1]).time(repetitions=2)
    total = found.total(["a", "b"])
    assert (total.first_seconds, total.seconds.values) == (11, (11, 22))
    assert total.result == [found["a"].result, found["b"].result]


def test_spread():
    spread = Spread((5.0, 1.0, 2.0, 4.0, 3.0))
    assert (spread.median, spread.quartiles) == (3, (2, 4))
    assert spread.map(lambda x: 60 / x).values == (12, 60, 30, 15, 20)
    assert spread.to_dict() == {"median": 3, "quartiles": [2, 4], "values": [5, 1, 2, 4, 3]}
    assert Timing(first_seconds=1.0, seconds=Spread((2.0,))).compile_seconds == 0  # never negative


def test_results_are_waited_for(monkeypatch):
    """Arrays anywhere in a result, and torch's device where it has one."""
    waited = []
    monkeypatch.setattr(timing.jax, "block_until_ready", lambda tree: waited.append(tree) or tree)
    cuda = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, synchronize=lambda: waited.append("torch")
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    result = {"tokens": jnp.arange(3), "text": "host"}
    time_in_turns({"a": lambda: result}, repetitions=1)
    assert waited == ["torch", result] * 2


def test_values_of_the_host_and_of_torch_are_results_too():
    torch = pytest.importorskip("torch")
    found = time_in_turns({"text": lambda: "abc", "torch": lambda: (torch.ones(2), None)}, repetitions=1)
    assert found["text"].result == "abc"
    assert found["torch"].result[0].tolist() == [1, 1]
    assert found["torch"].median > 0


@pytest.mark.parametrize(
    ("calls", "options", "message"),
    [
        ({}, {}, "calls: expected at least one, got none"),
        ({"a": int}, {"repetitions": 0}, "repetitions: expected an int of at least 1, got 0"),
        ({"a": int}, {"warm_ups": 0}, "warm_ups: expected an int of at least 1, got 0"),
    ],
)
def test_wrong_arguments(calls, options, message):
    with pytest.raises(ValueError, match=message):
        time_in_turns(calls, **options)


# Bandwidth.


def test_the_last_level_caches_are_counted_once(tmp_path):
    def cache(cpu: int, index: int, level: int, size: str, sharing: str) -> None:
        folder = tmp_path / f"cpu{cpu}" / "cache" / f"index{index}"
        folder.mkdir(parents=True)
        for name, text in (("level", str(level)), ("size", size), ("shared_cpu_list", sharing)):
            (folder / name).write_text(text + "\n")

    assert bandwidth.last_level_cache_bytes(tmp_path) == 0
    for cpu in range(4):  # two sockets of two CPUs
        cache(cpu, 0, 1, "48K", str(cpu))
        cache(cpu, 2, 2, "2048K", str(cpu))
        cache(cpu, 3, 3, "32M" if cpu < 2 else "491520K", "0-1" if cpu < 2 else "2-3")
    (tmp_path / "cpufreq").mkdir()
    (tmp_path / "cpu5" / "cache" / "index3").mkdir(parents=True)  # without what it should tell
    assert bandwidth.last_level_cache_bytes(tmp_path) == (32 + 480) * 2**20


def test_the_array_is_larger_than_the_caches_and_smaller_than_the_memory(monkeypatch):
    cpu = SimpleNamespace(platform="cpu")
    sizes = {"SC_PHYS_PAGES": 2**23, "SC_PAGE_SIZE": 4096}  # 32 GiB
    monkeypatch.setattr(bandwidth.os, "sysconf", sizes.get)
    for cache, expected in ((0, 2**28), (480 * 2**20, 1440 * 2**20), (2**32, 2**32)):
        monkeypatch.setattr(bandwidth, "last_level_cache_bytes", lambda cache=cache: cache)
        assert bandwidth._array_bytes(cpu) == expected
    gpu = SimpleNamespace(platform="gpu", memory_stats=lambda: {"bytes_limit": 80 * 2**30})
    assert bandwidth._array_bytes(gpu) == 2**30


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_bandwidth_is_bytes_over_the_shortest_time(platform, monkeypatch):
    """Three forms on a CPU, a copy that counts twice elsewhere: the best run of the best form."""
    forms = []
    for name in ("_sum", "_maximum", "_product", "_copy"):
        real = getattr(bandwidth, name)
        monkeypatch.setattr(bandwidth, name, lambda x, name=name, real=real: forms.append(name) or real(x))
    ticks = {"_sum": 4.0, "_maximum": 2.0, "_product": 5.0, "_copy": 4.0}
    now = [0.0]

    def perf_counter() -> float:
        now[0] += ticks[forms[-1]] if forms else 0.0
        return now[0]

    monkeypatch.setattr(bandwidth.time, "perf_counter", perf_counter)
    monkeypatch.setattr(bandwidth.jax, "device_put", lambda x, device: x)
    device = SimpleNamespace(platform=platform)
    found = bandwidth.read_bandwidth(device, num_bytes=2**20 + 5, repetitions=2)
    if platform == "cpu":
        assert set(forms) == {"_sum", "_maximum", "_product"}
        assert found == 2**20 / 2.0
    else:
        assert set(forms) == {"_sum", "_copy"}
        assert found == 8 * 2 * 2**20 / 4.0


def test_bandwidth_of_this_machine():
    assert 1e8 < lsjax.measure.read_bandwidth(num_bytes=2**22, repetitions=1) < 1e14
    with pytest.raises(ValueError, match="num_bytes: expected an int of at least 65536, got 100"):
        lsjax.measure.read_bandwidth(num_bytes=100)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_bytes_of_a_step_by_hand(tied, dtype):
    config = lsjax.LlamaConfig(
        vocab_size=100,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), random_params(config, 0))
    layer = 16 * 16 + 2 * 16 * 8 + 16 * 16 + 3 * 16 * 24 + 2 * 16
    head = 16 * 100 + 16
    size = jnp.dtype(dtype).itemsize
    for model in (params, lsjax.prepare(params), lsjax.Params.abstract(config, dtype)):
        assert lsjax.measure.step_bytes(model) == size * (3 * layer + head)
        assert lsjax.measure.step_bytes(model, num_layers=1) == size * (layer + head)
        one_position = 2 * 2 * 4  # key and value, 2 heads of 4 numbers
        assert lsjax.measure.step_bytes(model, positions=10) == size * (3 * layer + head + 3 * 10 * one_position)
        cached = lsjax.measure.step_bytes(model, num_layers=2, positions=[10, 7.5])
        assert cached == size * (2 * layer + head + 2 * 17.5 * one_position)
    with pytest.raises(ValueError, match=r"num_layers: expected a layer in 1\.\.3, got 4"):
        lsjax.measure.step_bytes(params, num_layers=4)


# Memory.


def test_the_host_s_peak(monkeypatch, tmp_path):
    (tmp_path / "status").write_text("Name:\tpython\nVmPeak:\t  900 kB\nVmHWM:\t   300 kB\nVmRSS:\t   200 kB\n")
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "status")
    assert memory.host_peak_bytes() == 300 * 1024
    monkeypatch.setattr(memory, "_STATUS", tmp_path / "absent")
    assert (memory.host_peak_bytes() or 0) > 2**20


def test_the_device_s_peak():
    gpu = SimpleNamespace(memory_stats=lambda: {"peak_bytes_in_use": 5})
    assert memory.device_peak_bytes(gpu) == 5
    assert memory.device_peak_bytes() is None  # a CPU


def test_what_a_program_holds():
    compiled = jax.jit(lambda x: jnp.sort(x @ x)).lower(jax.ShapeDtypeStruct((512, 512), jnp.float32)).compile()
    analysed: Any = compiled.memory_analysis()
    assert memory.program_bytes(compiled) == 2 * 2**20 + analysed.temp_size_in_bytes
