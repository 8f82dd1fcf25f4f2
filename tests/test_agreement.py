"""Agreement of layers: what is counted, what it costs, and how the command shows it.

That acceptance follows from it, count by count, is tested beside losslessness, where those programs are compiled.
"""

import dataclasses
import json
import sys
from typing import Any

import jax
import numpy as np
import pytest
from support import NumpyLlama, random_params, temporaries_of

import lsjax
import lsjax.cli
from lsjax.measure import agreement
from lsjax.measure.agreement import _choices, draft_costs
from lsjax.measure.replay import replay, wilson

CONFIG = lsjax.LlamaConfig(
    vocab_size=131,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
LENGTHS = np.array([12, 5, 9])
PROMPTS = np.random.default_rng(0).integers(3, CONFIG.vocab_size, (3, 12)) * (np.arange(12) < LENGTHS[:, None])


@pytest.fixture(scope="module")
def params():
    return random_params(CONFIG, 2, deep_from=1, deep_scale=0.2)


@pytest.fixture(scope="module")
def directory(params, tmp_path_factory):
    directory = tmp_path_factory.mktemp("agreement") / "model"
    lsjax.save(params, directory)
    return str(directory)


@pytest.fixture(scope="module")
def found(params):
    return agreement(params, PROMPTS, prompt_lengths=LENGTHS, max_new_tokens=20, eos_token_id=())


def test_a_layer_agrees_where_float64_forwards_say_so(params, found):
    oracle = NumpyLlama(params)
    text, _ = oracle.generate(PROMPTS, LENGTHS, 20)
    at = LENGTHS[:, None] - 1 + np.arange(20)
    choices = [np.take_along_axis(oracle.logits(text, depth).argmax(-1), at, axis=1) for depth in (1, 2, 3)]
    np.testing.assert_array_equal(found.matches, np.array(choices) == choices[-1])
    assert 0.1 < found.rate[0] < 1
    assert found.rate[2] == 1
    np.testing.assert_allclose(found.rate_per_prompt, found.matches.mean(axis=2))
    assert (found.generated, found.parted) == (True, 0)


def test_the_text_of_the_caller_is_measured_without_generating(params):
    found = agreement(params, PROMPTS, prompt_lengths=LENGTHS, max_new_tokens=0)
    oracle = NumpyLlama(params)
    choices = np.array([oracle.logits(PROMPTS, depth).argmax(-1) for depth in (1, 2, 3)])
    valid = np.arange(12) < LENGTHS[:, None]
    np.testing.assert_array_equal(found.lengths, LENGTHS)
    np.testing.assert_array_equal(found.matches & valid, (choices == choices[-1]) & valid)
    assert found.rate[0] == ((choices[0] == choices[-1]) & valid).sum() / LENGTHS.sum()
    assert not found.generated
    assert "the given text" in str(found)


def test_the_replay_on_a_text_by_hand():
    matches = np.array([[[True, True, False, True, True, True, True]]])
    lengths, limits, ended = np.array([7]), np.array([7]), np.array([False])
    # K = 2: two kept and a third token, which the layer had wrong; two kept and the bonus; the last token alone.
    stats = replay(matches, lengths, limits, ended, 2)
    assert (int(stats.rounds[0, 0]), int(stats.drafted[0, 0]), int(stats.accepted[0, 0])) == (3, 4, 4)
    assert stats.accept_histogram.tolist() == [[[1, 0, 2]]]
    # An EOS at the fifth token, drafted and kept: drafts behind it do not count.
    stats = replay(matches, np.array([5]), np.array([20]), np.array([True]), 4)
    assert (int(stats.rounds[0, 0]), int(stats.drafted[0, 0]), int(stats.accepted[0, 0])) == (2, 6, 4)
    assert int(stats.new_tokens[0, 0]) == 5


def test_wilson_s_interval():
    low, high = wilson(np.array([0, 5, 10, 0]), np.array([10, 10, 10, 0]))
    np.testing.assert_allclose(low, [0, 0.2366, 0.7225, 0], atol=1e-4)
    np.testing.assert_allclose(high, [0.2775, 0.7634, 1, 1], atol=1e-4)


def test_the_estimate_is_tokens_a_round_over_the_bytes_of_a_round(params, found):
    layer = 32 * (32 + 16 + 16 + 32) + 3 * 32 * 48 + 2 * 32
    head = 32 * 131 + 32
    costs = (np.arange(1, 4) * layer + head) / (3 * layer + head)
    np.testing.assert_allclose(draft_costs(params), costs)
    np.testing.assert_allclose(found.estimated_speed_up, found.tokens_per_round / (1 + 4 * costs))
    plain = dataclasses.replace(found, num_speculations=0)
    np.testing.assert_array_equal(plain.estimated_speed_up, 1)
    assert plain.best_layer is None
    eager = dataclasses.replace(found, draft_costs=np.array([0.1, 0.2, 1.0]), matches=np.ones_like(found.matches))
    assert eager.best_layer == 1
    assert "Exit at layer 1 of 3" in str(eager)
    assert str(eager).count("<- best") == 1
    never = dataclasses.replace(found, matches=np.arange(3)[:, None, None] == np.full((3, 20), 2))
    assert never.best_layer is None
    assert "No exit is expected to pay" in str(never)


def test_only_one_exit_s_logits_are_alive_at_a_time():
    """The compiled program's temporary memory does not grow with the layers, and holds one row's logits at most."""
    tokens, first, sizes = jax.ShapeDtypeStruct((4, 64), np.int32), jax.ShapeDtypeStruct((4,), np.int32), {}
    for layers in (2, 6):
        config = dataclasses.replace(CONFIG, num_hidden_layers=layers, vocab_size=20_000)
        compiled = _choices.lower(lsjax.Params.abstract(config), tokens, first, 64, 64).compile()
        sizes[layers] = temporaries_of(compiled)
    row = 64 * 20_000 * 4
    assert sizes[6] < sizes[2] + row / 4
    assert row <= sizes[6] < 2 * row


def test_wrong_arguments(params):
    with pytest.raises(TypeError, match="call it outside jit"):
        jax.jit(lambda tokens: agreement(params, tokens).matches)(PROMPTS)
    with pytest.raises(ValueError, match="max_new_tokens: expected an int of at least 0, got -1"):
        agreement(params, PROMPTS, max_new_tokens=-1)
    with pytest.raises(TypeError, match="params: expected lsjax"):
        agreement(params.tree, PROMPTS)


# The command.


@pytest.fixture
def ids(tmp_path):
    rows = [row[:length].tolist() for row, length in zip(PROMPTS, LENGTHS, strict=True)]
    (tmp_path / "ids.jsonl").write_text("".join(json.dumps({"tokens": row}) + "\n\n" for row in rows))
    return str(tmp_path / "ids.jsonl")


def test_the_command_prints_the_library_s_table(directory, ids, params, capsys, tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "layers.png"
    arguments = ["agreement", directory, "--prompts", ids, "--max-new-tokens", "20", "--num-speculations", "3"]
    assert lsjax.cli.main([*arguments, "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    found = agreement(params, PROMPTS, prompt_lengths=LENGTHS, max_new_tokens=20, num_speculations=3)
    assert out == f"{found}\n"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 20_000
    assert lsjax.cli.main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["dtype"], report["num_speculations"]) == (directory, "float32", 3)
    assert [layer["agreement"] for layer in report["layers"]] == found.rate.tolist()
    assert [layer["acceptance_rate"] for layer in report["layers"]] == found.acceptance_rate.tolist()


def test_the_picture_says_what_was_measured(found):
    pytest.importorskip("matplotlib")
    before = "matplotlib.pyplot" in sys.modules
    from lsjax.measure.plot import draw

    figure = draw(found, "small (float32)")
    assert figure.get_suptitle() == (
        "small (float32)\n60 greedy tokens of the model's own, 3 prompts; rounds of K = 4 drafts; band: 95% interval"
    )
    assert [axes.get_ylabel() for axes in figure.axes] == ["share of tokens (%)", "tokens; times autoregressive"]
    assert figure.axes[1].get_xlabel() == "exit after layer"
    lines: Any = {line.get_label(): line.get_ydata() for line in figure.axes[0].lines}
    np.testing.assert_allclose(lines["agrees with the last layer"], 100 * found.rate)
    np.testing.assert_allclose(lines["drafts accepted, K = 4"], 100 * found.acceptance_rate)
    assert ("matplotlib.pyplot" in sys.modules) == before


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        ("", "empty.txt", "expected a prompt a line, got nothing"),
        ('{"prompt": 3}', "bad.jsonl", "got '{\"prompt\": 3}'"),
        ('{"tokens": []}', "bad.jsonl", 'expected {"prompt": "..."} or {"tokens": [ids]}'),
        ("not json", "bad.jsonl", "got 'not json'"),
        ('{"tokens": [3]}\n{"tokens": [true]}', "bad.jsonl", "in line 2 of"),
        ('{"tokens": [3, 99999999999999]}', "bad.jsonl", "in line 1 of"),
        ('{"tokens": [5, 131]}', "range.jsonl", "expected ids in 0..130, got 131"),
        ("hello", "text.txt", 'give ids, --prompts FILE.jsonl with lines {"tokens": [1, 2, 3]}'),
    ],
)
def test_prompts_that_do_not_fit(text, name, message, directory, tmp_path, capsys):
    (tmp_path / name).write_text(text)
    assert lsjax.cli.main(["agreement", directory, "--prompts", str(tmp_path / name)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "no such file"], "'no such file'"),
        (["--plot", "layers.pdf"], "ends in .png, got 'layers.pdf'"),
        (["--plot", "no/such/folder.png"], "existing directory"),
        (["--num-speculations", "-1"], "at least 0, got '-1'"),
    ],
)
def test_wrong_usage(arguments, message, capsys):
    assert lsjax.cli.main(["agreement", "m", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_package_brings_it_without_torch_transformers_or_matplotlib():
    import subprocess

    code = (
        "import sys, lsjax; lsjax.measure.parity, lsjax.measure.agreement\n"
        "assert not {'torch', 'transformers', 'matplotlib', 'tokenizers'} & set(sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr


def test_lines_end_at_line_breaks_alone(tmp_path):
    from lsjax.text.prompts import read_file

    texts = ["one\u2028line", "another\x0b"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    for name, content in (("a.jsonl", "\r\n".join(lines)), ("a.txt", "\n".join(texts))):
        (tmp_path / name).write_text("\ufeff" + content, encoding="utf-8", newline="")
        assert read_file(tmp_path / name) == texts


def test_half_a_character_is_no_prompt(tmp_path):
    from lsjax.text.prompts import read_file

    (tmp_path / "a.jsonl").write_text(r'{"prompt": "half of \ud83d"}')
    with pytest.raises(ValueError, match=r"line 1 of .*: expected Unicode text, got the lone surrogate in 'half of "):
        read_file(tmp_path / "a.jsonl")
