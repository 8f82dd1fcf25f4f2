"""What README shows is what runs."""

import re
from pathlib import Path

import pytest

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


@pytest.mark.demo
def test_the_api_example_runs_as_it_stands(capsys):
    code, options, texts, _ = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(code.strip().splitlines()) <= 12
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)
    text = capsys.readouterr().out
    assert text.startswith("The capital of France is")
    assert scope["logits"].shape == (len(scope["tokens"]), scope["params"].config.vocab_size)
    exec(compile(options, "README.md", "exec"), scope)
    assert capsys.readouterr().out.startswith("The capital of France is")
    assert scope["out"].scores.top_tokens.shape == (len(scope["tokens"]) + 24, 5)
    exec(compile(texts, "README.md", "exec"), scope)
    assert scope["answer"].finish_reason == "stop"
    assert "Pari" not in scope["answer"].text
    assert len(capsys.readouterr().out.splitlines()[-1]) > 40


def test_the_experiment_runs_as_it_stands():
    *_, code = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    scope: dict = {}
    exec(compile(code, "README.md", "exec"), scope)
    assert scope["rates"].shape == (32,)
    assert scope["out"].tokens.shape == (16 + 128,)


def test_the_two_commands_name_extras_that_exist():
    import tomllib

    extras = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    named = re.findall(r"-e '\.\[([a-z0-9,]+)\]'", README)
    assert len(named) >= 3
    assert {extra for group in named for extra in group.split(",")} <= extras.keys()
