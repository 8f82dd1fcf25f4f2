"""Hostile GGUF files, loaded as models and as tokenizers: headers written here byte by byte, and seeded damage."""

import os
import random
import struct

import numpy as np
import pytest
from checkpoints import gguf_metadata, gguf_tensors, random_model, write_gguf
from hostile import fails, flip, loads_or_fails, peak_memory, splice, truncate

from lsjax.io import load
from lsjax.text.tokenizer import load_tokenizer

pytest.importorskip("gguf")

TOKENS = [*(chr(code) for code in range(0x100, 0x200)), "Āā", "<s>"]
VOCABULARY = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": [1] * 257 + [3],
    "tokenizer.ggml.merges": ["Ā ā"],
}


@pytest.fixture(scope="module")
def small():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "vocab_size": len(TOKENS)}
    return random_model(1, num_hidden_layers=1, **sizes)


def string(text) -> bytes:
    data = text if isinstance(text, bytes) else text.encode()
    return struct.pack("<Q", len(data)) + data


def entry(name, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


def tensor(name="output_norm.weight", dims=(8,), kind=0, offset=0, rank=None) -> bytes:
    shape = struct.pack(f"<{len(dims)}Q", *dims)
    return (
        string(name) + struct.pack("<I", len(dims) if rank is None else rank) + shape + struct.pack("<IQ", kind, offset)
    )


def header(entries=(), tensors=(), num_entries=None, num_tensors=None, version=3, magic=b"GGUF") -> bytes:
    counts = (num_tensors, tensors), (num_entries, entries)
    numbers = [len(found) if said is None else said for said, found in counts]
    return magic + struct.pack("<IQQ", version, *numbers) + b"".join(entries) + b"".join(tensors)


LLAMA = entry("general.architecture", 8, string("llama"))
NESTED = entry("a", 9, struct.pack("<IQ", 9, 1) * 5000)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "empty: model.gguf (0 bytes)"),
        (b"GGUF", "the version at byte 4: expected 4 bytes, got 0"),
        (header(magic=b"FUGG"), "expected the magic b'GGUF', got b'FUGG'"),
        (header(version=1), "expected version 2 or 3, got 1"),
        (header(version=0), "expected version 2 or 3, got 0"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "expected a little-endian file, got a big-endian one"),
        (header(num_tensors=2**63), "the number of tensors: got 9,223,372,036,854,775,808"),
        (header(num_entries=2**64 - 1), "the number of entries: got 18,446,744,073,709,551,615"),
        (header([LLAMA], num_entries=2) + bytes(9), "not GGUF, truncated or altered"),
        (header([LLAMA, LLAMA]), "general.architecture stands twice in the metadata"),
        (header([entry("x" * 70_000, 4, bytes(4))]), "a key: expected at most 65,535 bytes, got 70,000"),
        (header([struct.pack("<Q", 2**63) + bytes(20)]), "a key at byte 24: expected 9,223,372,036,854,775,816 bytes"),
        (header([entry(b"\xff\xfe", 4, bytes(4))]), "a key: expected UTF-8"),
        (header([entry("a", 8, string(b"\xff"))]), "a: expected UTF-8"),
        (header([entry("a", 8, struct.pack("<Q", 2**64 - 1))]), "a at byte"),
        (header([entry("a", 13, bytes(8))]), "a: expected a value of type 0 to 12, got type 13"),
        (header([entry("a", 7, b"\x02")]), "a: expected booleans of 0 or 1"),
        (header([entry("a", 9, struct.pack("<IQ", 4, 2**63))]), "a: got 9,223,372,036,854,775,808, more than"),
        (header([entry("a", 9, struct.pack("<IQ", 8, 2**60))]), "a: got 1,152,921,504,606,846,976, more than"),
        (header([entry("a", 9, struct.pack("<IQ", 99, 1))]), "a: expected an array of numbers or strings"),
        (header([NESTED]), "a: expected an array of numbers or strings, got one of type 9"),
        (header([entry("general.alignment", 4, struct.pack("<I", 0))]), "general.alignment: expected a power of two"),
        (header([entry("general.alignment", 4, struct.pack("<I", 48))]), "general.alignment: expected a power of two"),
        (header([entry("general.alignment", 8, string("32"))]), "general.alignment: expected a power of two, got '32'"),
        (header(tensors=[tensor("x" * 65)]), "a tensor's name: expected at most 64 bytes, got 65"),
        (header(tensors=[tensor(rank=10**9)]), "expected 1 to 4 dimensions, got 1,000,000,000"),
        (header(tensors=[tensor(dims=())]), "expected 1 to 4 dimensions, got 0"),
        (header(tensors=[tensor(), tensor()]), "the tensor output_norm.weight stands twice"),
        (header([LLAMA], [tensor(dims=(2**32, 2**32))]), "truncated or altered: output_norm.weight"),
        (header([LLAMA], [tensor(dims=(2**63, 2**63, 2**63, 2**63))]), "truncated or altered: output_norm.weight"),
        (header([LLAMA], [tensor(offset=2**64 - 32)]), "wrong offset: output_norm.weight in model.gguf: expected 0"),
        (header([LLAMA], [tensor(), tensor("b")]) + bytes(256), "wrong offset: b in model.gguf: expected 32, got 0"),
        (header([LLAMA], [tensor(offset=64)]) + bytes(256), "wrong offset: output_norm.weight in model.gguf"),
        (header([LLAMA], [tensor(kind=2)]) + bytes(256), "expected rows of a multiple of 32 for Q4_0, got [8]"),
        (header([LLAMA], [tensor(dims=(0,))]), "llama.block_count is missing"),
        (header([], [tensor(kind=4000)]) + bytes(256), "general.architecture: expected 'llama', got None"),
        (
            header([entry("general.architecture", 9, struct.pack("<IQ", 8, 0))]),
            "general.architecture: expected 'llama'",
        ),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12\n", "git-lfs pointer: model.gguf"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_headers_that_lie(data, words, tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    peak = peak_memory(fails, path, words)
    assert peak < 3e6
    loads_or_fails(path, load_tokenizer)


ABSURD = [
    ({"llama.block_count": "1"}, "num_hidden_layers: expected an int above 0, got '1'"),
    ({"llama.block_count": True}, "num_hidden_layers: expected an int above 0, got True"),
    ({"llama.block_count": 1.0}, "num_hidden_layers: expected an int above 0, got 1.0"),
    ({"llama.block_count": 10**8}, "100000000 layers in the configuration"),
    ({"llama.attention.head_count": [2, 2]}, "num_attention_heads: expected an int above 0, got [2, 2]"),
    ({"llama.attention.key_length": 4096, "llama.attention.value_length": 4096}, "llama.rope.dimension_count"),
    ({"llama.rope.freq_base": float("nan")}, "rope_theta: expected a number above 0, got nan"),
    ({"llama.rope.freq_base": float("inf")}, "rope_theta: expected a number above 0, got inf"),
    ({"llama.rope.freq_base": 0.0}, "rope_theta: expected a number above 0, got 0.0"),
    ({"llama.rope.freq_base": "x" * 10**5}, "rope_theta: expected a number above 0"),
    ({"tokenizer.ggml.eos_token_id": 2**32 - 1}, "eos_token_id: expected token ids of at least 0"),
    ({"tokenizer.ggml.bos_token_id": "1"}, "bos_token_id: expected an int or None, got '1'"),
]


@pytest.mark.parametrize(("changes", "words"), ABSURD)
def test_absurd_metadata(changes, words, small, tmp_path):
    write_gguf(tmp_path / "model.gguf", gguf_metadata(small.config, **changes), gguf_tensors(small))
    fails(tmp_path / "model.gguf", words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": [1, 2, 3]}, "tokenizer.ggml.tokens: expected an array of str, got [1, 2, 3]"),
        ({"tokens": "abc"}, "tokenizer.ggml.tokens: expected an array of str, got 'abc'"),
        ({"merges": [0.5]}, "tokenizer.ggml.merges: expected an array of str, got [0.5]"),
        ({"merges": ["Ā x"]}, "tokenizer.ggml.merges"),
        ({"merges": [""]}, "tokenizer.ggml.merges: expected pairs of tokens"),
        ({"token_type": ["1"] * 258}, "tokenizer.ggml.token_type: expected an array of int"),
        ({"model": 7}, "tokenizer.ggml.model: expected str, got 7"),
        ({"pre": ["smollm"]}, "tokenizer.ggml.pre: expected str, got ['smollm']"),
        ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token: expected bool, got 1"),
        ({"bos_token_id": "1"}, "tokenizer.ggml.bos_token_id: expected int, got '1'"),
        ({"unknown_token_id": 2**32 - 1}, "tokenizer.ggml.unknown_token_id: expected an id in 0..257, got 4294967295"),
        ({"scores": [1, 2], "model": "llama", "pre": "default"}, "tokenizer.ggml.scores: expected an array of float"),
    ],
)
def test_absurd_vocabularies(changes, words, small, tmp_path):
    changed = {f"tokenizer.ggml.{name}": value for name, value in changes.items()}
    write_gguf(tmp_path / "model.gguf", gguf_metadata(small.config, **(VOCABULARY | changed)), gguf_tensors(small))
    fails(tmp_path / "model.gguf", words, load_tokenizer)


def test_a_chat_template_that_is_no_text(small, tmp_path):
    metadata = gguf_metadata(small.config, **VOCABULARY) | {"tokenizer.chat_template": 3}
    write_gguf(tmp_path / "model.gguf", metadata, gguf_tensors(small))
    fails(tmp_path / "model.gguf", "tokenizer.chat_template: expected a string", load_tokenizer)


def test_a_type_that_ggml_does_not_have_is_named(small, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, gguf_metadata(small.config), gguf_tensors(small))
    data = path.read_bytes()
    where = data.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    path.write_bytes(data[:where] + struct.pack("<I", 999) + data[where + 4 :])
    fails(path, "wrong dtype: output_norm.weight in model.gguf: expected F16, BF16, F32, F64, got ggml type 999")


def test_damaged_files_load_or_fail_as_models_and_tokenizers(small, tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, gguf_metadata(small.config, **VOCABULARY), gguf_tensors(small))
    whole = path.read_bytes()
    end = whole.index(b"output_norm.weight") + 64
    rng = random.Random(0)
    refused = 0
    for case in range(300):
        path.write_bytes((truncate(rng, whole), flip(rng, whole, end), splice(rng, whole, end))[case % 3])
        refused += loads_or_fails(path)
        if case % 2:
            loads_or_fails(path, load_tokenizer)
    assert refused > 150


def test_scales_that_are_not_finite_load_quietly(small, tmp_path):
    params = random_model(1, num_hidden_layers=1, hidden_size=32, vocab_size=4, num_attention_heads=2)
    tensors = gguf_tensors(params)
    write_gguf(tmp_path / "model.gguf", gguf_metadata(params.config), tensors, {"token_embd.weight": "Q8_0"})
    data = bytearray((tmp_path / "model.gguf").read_bytes())
    import gguf

    block = gguf.quantize(tensors["token_embd.weight"], gguf.GGMLQuantizationType.Q8_0).tobytes()
    where = bytes(data).index(block)
    data[where : where + 2] = np.float16(np.inf).tobytes()
    (tmp_path / "model.gguf").write_bytes(data)
    assert not np.isfinite(load(tmp_path / "model.gguf").tree["embed_tokens"]["embedding"]).all()


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
@pytest.mark.parametrize("kind", ["FIFO", "directory", "pointer", "empty"])
def test_a_directorys_tokenizer_files_are_files(kind, name, tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    path = tmp_path / name
    path.unlink(missing_ok=True)
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_bytes(b"version https://git-lfs.github.com/spec/v1\nsize 9\n" if kind == "pointer" else b"")
    words = {"pointer": f"git-lfs pointer: {name}", "empty": f"empty: {name}"}.get(
        kind, f"not a file: {name} is a {kind}"
    )
    fails(tmp_path, words, load_tokenizer)


@pytest.mark.parametrize(
    "content", ["{}", "[]", "{", '{"model": {"type": "BPE"}}', '{"version": 3}', "[" * 10**5, "\x00"]
)
def test_a_broken_tokenizer_json_is_one_error(content, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "tokenizer.json").write_text(content)
    fails(tmp_path, "transformers cannot read its tokenizer", load_tokenizer)
