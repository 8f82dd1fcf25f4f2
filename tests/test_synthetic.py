"""Synthetic checkpoints whose exit agrees at a chosen rate: the construction, its calibration, its files."""

import importlib.util
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checkpoints import assert_same_arrays

import lsjax
from lsjax.measure import agreeing_params, calibrate, measure_acceptance, scale_deep_layers, shortest_cycle
from lsjax.measure.calibration import _flips
from lsjax.measure.synthetic import SHAPES

EXIT = 2
CONFIG = lsjax.LlamaConfig(
    vocab_size=2048,
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=5,
    num_attention_heads=8,
    num_key_value_heads=2,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    tie_word_embeddings=True,
    eos_token_id=(),
)
PROMPTS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (16, 16))


@pytest.fixture(scope="module")
def base():
    return agreeing_params(CONFIG, exit_layer=EXIT, scale=1, key=jax.random.key(0))


@pytest.fixture(scope="module")
def found(base):
    return calibrate(base, exit_layer=EXIT, acceptance=0.75, key=jax.random.key(1))


def test_acceptance_falls_from_one_as_the_scale_rises(base):
    scales = (0, 0.02, 0.1, 1)
    models = [scale_deep_layers(base, EXIT, scale) for scale in scales]
    checks = [measure_acceptance(model, PROMPTS, exit_layer=EXIT) for model in models]
    rates = [check.acceptance_rate for check in checks]
    assert rates[0] == 1
    assert all(first > second + 0.1 for first, second in itertools.pairwise(rates)), rates
    assert rates[-1] < 0.1
    assert {check.new_tokens for check in checks} == {16 * 136}
    assert [check.shortest_cycle for check in checks[:3]] == [None] * 3
    # Rounds of 4 drafts and one token more; the last one has the limit before it.
    np.testing.assert_array_equal(checks[0].stats.rounds, -(-136 // 5))
    stats = checks[2].stats
    assert rates[2] == stats.accepted.sum() / stats.drafted.sum()
    assert 0 < checks[2].standard_error < 0.05


def test_the_calibrated_scale_holds_for_other_prompts(base, found):
    assert found.tried[-1] == (found.scale, found.found.acceptance_rate)
    assert abs(found.found.acceptance_rate - 0.75) <= 0.03
    assert found.found.new_tokens >= 2000
    assert found.found.shortest_cycle is None
    other = measure_acceptance(scale_deep_layers(base, EXIT, found.scale), PROMPTS, exit_layer=EXIT)
    assert abs(other.acceptance_rate - 0.75) < 0.05  # 2,176 tokens: a standard error of 0.015, and the scale's own
    assert other.shortest_cycle is None


def test_a_scale_and_a_key_make_the_model_again(base, found):
    again = agreeing_params(CONFIG, exit_layer=EXIT, scale=found.scale, key=jax.random.key(0))
    assert_same_arrays(again, scale_deep_layers(base, EXIT, found.scale))
    differ = [
        path
        for (path, a), b in zip(jax.tree.leaves_with_path(again.tree), jax.tree.leaves(base.tree), strict=True)
        if not np.array_equal(a, b)
    ]
    names = sorted({"/".join(str(key.key) for key in path) for path in differ})
    deep = range(EXIT, CONFIG.num_hidden_layers)
    modules = ("mlp/down_proj/kernel", "self_attn/o_proj/kernel")
    assert names == [f"layers_{layer}/{module}" for layer in deep for module in modules]


def test_prepared_models_are_scaled_alike(base):
    prepared = scale_deep_layers(lsjax.prepare(base), EXIT, 0.1)
    expected = lsjax.prepare(scale_deep_layers(base, EXIT, 0.1))
    assert jax.tree.structure(prepared) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, prepared, expected)


def test_flips_say_where_the_choice_changes(base):
    """Against the logits themselves, a little below and above each flip, and at the model as it is."""
    model = scale_deep_layers(base, EXIT, 0.05)
    flips = np.asarray(_flips(model, PROMPTS[:4], EXIT))
    early, _ = model.run_layers(model.embed(PROMPTS[:4]), (), 0, hi=EXIT)
    late, _ = model.run_layers(early, (), 0, lo=EXIT)

    def choice(factor):
        return np.asarray(model.logits(early + jnp.asarray(factor)[..., None] * (late - early)).argmax(-1))

    np.testing.assert_array_equal(choice(flips * 0.99), choice(0 * flips))
    assert (choice(flips * 1.01) != choice(0 * flips)).all()
    shallow, deep = (logits.argmax(-1) for logits in lsjax.forward(model, PROMPTS[:4], exits=(EXIT, 5)))
    np.testing.assert_array_equal(flips > 1, shallow == deep)
    assert 0.3 < (flips > 1).mean() < 0.95
    assert np.asarray(_flips(scale_deep_layers(base, EXIT, 0), PROMPTS[:4], EXIT)).min() > 1e3  # of rounding


def test_checkpoints_are_transformers_and_say_what_they_are(base, found, tmp_path):
    torch = pytest.importorskip("torch")
    import transformers

    params = scale_deep_layers(base, EXIT, found.scale)
    target = tmp_path / "model"
    for _ in range(2):  # a second one replaces the first
        lsjax.measure.save_synthetic(params, target, {"scale": found.scale, **found.found.to_dict()})
    said = json.loads((target / "config.json").read_text())["synthetic"]
    assert said["scale"] == found.scale
    assert said["acceptance_rate"] == round(found.found.acceptance_rate, 4)
    assert "synthetic" in (target / "README.md").read_text()
    loaded = lsjax.load(target)
    assert loaded.config == CONFIG
    assert_same_arrays(loaded, params)

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(target)
    assert type(model).__name__ == "LlamaForCausalLM"
    tokens = torch.tensor(PROMPTS[:4])
    with torch.no_grad():
        expected = model(tokens).logits.numpy()
        text = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=32, do_sample=False)
    scale = expected.std()
    assert 1.5 < scale < 2.5
    np.testing.assert_allclose(lsjax.forward(loaded, PROMPTS[:4]), expected, rtol=1e-4, atol=1e-4 * float(scale))
    out = lsjax.generate(loaded, PROMPTS[:4], exit_layer=EXIT, max_new_tokens=32)
    np.testing.assert_array_equal(out.tokens, text.numpy())


def test_the_benchmarks_script_finds_a_scale_once_and_writes_what_it_checked(base, tmp_path, monkeypatch, capsys):
    path = Path(__file__).parents[1] / "benchmarks" / "agreeing.py"
    spec: Any = importlib.util.spec_from_file_location("agreeing", path)
    script: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    monkeypatch.setattr(script, "SHAPES", {"small": CONFIG})
    monkeypatch.setattr(script, "SCALES", tmp_path / "agreeing.json")

    def run(*options):
        given = ["--shape", "small", "--exit-layer", str(EXIT), "--acceptance", "0.8", *options]
        monkeypatch.setattr(sys, "argv", ["agreeing.py", *given])
        script.main()
        return json.loads(capsys.readouterr().out)

    first = run("--out", str(tmp_path / "first"))
    assert abs(first["checked"]["acceptance_rate"] - 0.8) <= 0.03
    assert first["checked"] != first["found"]
    monkeypatch.setattr(script, "calibrate", None)
    again = run("--no-check", "--out", str(tmp_path / "again"))
    assert again["scale"] == first["scale"]
    for name in ("first", "again"):
        assert_same_arrays(lsjax.load(tmp_path / name), scale_deep_layers(base, EXIT, first["scale"]))
    said = json.loads((tmp_path / "again" / "config.json").read_text())["synthetic"]
    assert said["name"] == "synthetic-small-exit-2-accepts-0.8"
    assert said["checked"] == first["checked"]
    monkeypatch.setattr(script, "TOLERANCE", 0)
    with pytest.raises(SystemExit, match=r"not written: acceptance 0\.\d+, expected 0\.8 within 0"):
        run("--out", str(tmp_path / "third"))
    assert not (tmp_path / "third").exists()


def test_cycles_are_found_wherever_they_stand():
    rng = np.random.default_rng(0)
    text = rng.permutation(2000)[:1200].reshape(4, 300)
    assert shortest_cycle(text) is None
    assert shortest_cycle(np.tile(text[0, :20], 3)) == 20
    assert shortest_cycle(np.tile(text[0, :20], 3)[:-1]) is None
    for period, length in [(1, 8), (2, 8), (3, 9), (15, 45), (16, 48)]:
        cyclic = text.copy()
        cyclic[2, 100 : 100 + length] = np.resize(text[0, :period], length)
        assert shortest_cycle(cyclic) == period
        cyclic[2, 100 + length - 1] = -1
        assert shortest_cycle(cyclic) is None
    both = np.concatenate([np.resize(text[0, :9], 60), np.resize(text[1, :4], 60)])
    assert shortest_cycle(both) == 4


def test_published_shapes():
    sizes = {name: lsjax.Params.abstract(config).num_parameters for name, config in SHAPES.items()}
    assert sizes == {"llama-3.2-1b": 1_235_814_400, "llama-3-8b": 8_030_261_248}


def test_what_cannot_be_is_refused(base):
    with pytest.raises(ValueError, match="exit_layer: expected a layer before the last"):
        agreeing_params(CONFIG, exit_layer=5, scale=1, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"scale: expected a number of at least 0, got -1"):
        scale_deep_layers(base, EXIT, -1)
    for acceptance in (0, 1, 1.5):
        with pytest.raises(ValueError, match="acceptance: expected a share above 0 and below 1"):
            calibrate(base, exit_layer=EXIT, acceptance=acceptance, key=jax.random.key(1))
    with pytest.raises(ValueError, match=r"acceptance: expected 0\.75 within 1e-09, got 0\.\d+ at scale"):
        calibrate(base, exit_layer=EXIT, acceptance=0.75, key=jax.random.key(1), tolerance=1e-9, attempts=1)
