"""Checkpoints for the tests of loading: small random models, and directories written here with names spelled out."""

import json
import math

import numpy as np
from safetensors.numpy import save_file
from support import random_params
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

import lsjax
from lsjax.convert.names import HUGGINGFACE, source_shape
from lsjax.params import abstract_tree, flatten

SMALL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-3,
}


def model_config(**changes) -> lsjax.LlamaConfig:
    return lsjax.LlamaConfig(**{**SMALL, **changes})


def random_model(seed: int, **changes) -> lsjax.Params:
    """Random weights whose logits deviate by about 2."""
    params = random_params(model_config(**changes), seed)
    params.tree["norm"]["scale"] *= 2
    return params


def write_plain(directory, params, **config_changes):
    """The checkpoint as plain NumPy writes it, names and layouts spelled out here; returns its tensors."""
    tensors = {}
    for path, leaf in flatten(params.tree).items():
        *modules, kind = path.replace("layers_", "layers.").split("/")
        name = ".".join(modules) + (".bias" if kind == "bias" else ".weight")
        name = name if name.startswith("lm_head") else f"model.{name}"
        tensors[name] = np.ascontiguousarray(np.asarray(leaf).T if kind == "kernel" else np.asarray(leaf))
    directory.mkdir(parents=True, exist_ok=True)
    write_config(directory, params.config, **config_changes)
    save_file(tensors, directory / "model.safetensors")
    return tensors


def write_config(directory, config, **changes):
    (directory / "config.json").write_text(json.dumps({**config.to_dict(), **changes}))


def write_shards(directory, tensors, count=3):
    """The same tensors over ``count`` files with an index; returns the names in each."""
    (directory / "model.safetensors").unlink(missing_ok=True)
    names = sorted(tensors)
    parts = {f"model-{i + 1:05}-of-{count:05}.safetensors": names[i::count] for i in range(count)}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, directory / file)
    placed = {name: file for file, held in parts.items() for name in held}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return parts


def write_sparse(directory, count=8, **changes) -> dict:
    """A checkpoint of 65 billion parameters without data: headers of sparse files; returns each tensor's file."""
    sizes = {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672}
    config = model_config(**sizes | changes)
    write_config(directory, config)
    placed, offset, entries = {}, {}, {}
    for i, (path, leaf) in enumerate(flatten(abstract_tree(config)).items()):
        name, transform = HUGGINGFACE.from_flax(path)
        file = f"model-{i % count + 1:05}-of-{count:05}.safetensors"
        start, size = offset.get(file, 0), 2 * math.prod(leaf.shape)
        shape = list(source_shape(transform, leaf.shape))
        entries.setdefault(file, {})[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, start + size]}
        offset[file] = start + size
        placed[name] = file
    for file, header in entries.items():
        data = json.dumps(header).encode()
        with (directory / file).open("wb") as out:
            out.write(len(data).to_bytes(8, "little") + data)
            out.truncate(8 + len(data) + offset[file])
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": placed}))
    return placed


def assert_same_arrays(found, expected):
    found, expected = flatten(found.tree), flatten(expected.tree)
    assert found.keys() == expected.keys()
    for path, leaf in found.items():
        assert leaf.dtype == expected[path].dtype, path
        np.testing.assert_array_equal(leaf, expected[path], err_msg=path)


def write_byte_tokenizer(directory, **settings):
    """A tokenizer of single bytes, ids 0 to 255, then ``<s>`` and ``</s>``; ``settings`` go into its configuration."""
    vocabulary = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", **settings}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))


GGUF_NAMES = {
    "embed_tokens": "token_embd",
    "norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def gguf_metadata(config: lsjax.LlamaConfig, **changes) -> dict:
    """What llama.cpp's converter writes about a Llama; ``changes`` to None leave an entry out."""
    entries = {
        "general.architecture": "llama",
        "llama.block_count": config.num_hidden_layers,
        "llama.context_length": config.max_position_embeddings,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.num_attention_heads,
        "llama.attention.head_count_kv": config.num_key_value_heads,
        "llama.attention.key_length": config.head_dim,
        "llama.attention.value_length": config.head_dim,
        "llama.rope.dimension_count": config.head_dim,
        "llama.rope.freq_base": float(config.rope_theta),
        "llama.attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "llama.vocab_size": config.vocab_size,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return {name: value for name, value in (entries | changes).items() if value is not None}


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Each head's rows for rotation in pairs: row i of its first half, then row i of its second half."""
    size = rows.shape[0] // heads
    order = [head * size + half * size // 2 + i for head in range(heads) for i in range(size // 2) for half in (0, 1)]
    return rows[order]


def write_gguf(path, metadata: dict, tensors: dict, kinds: dict | None = None, stored_kinds: dict | None = None):
    """A GGUF file; ``kinds`` names the type that a tensor is quantized to, ``stored_kinds`` what bytes already are."""
    import gguf

    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for name, value in metadata.items():
        if name == "general.architecture":
            continue
        kind = type(value[0] if isinstance(value, list) else value)
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, bool: writer.add_bool}
        (writer.add_array if isinstance(value, list) else add[kind])(name, value)
    for name, value in tensors.items():
        kind = (kinds or {}).get(name)
        if name in (stored_kinds or {}):
            writer.add_tensor(name, value, raw_dtype=(stored_kinds or {})[name])
        elif kind is None:
            writer.add_tensor(name, value)
        else:
            quantized = gguf.quantize(value, gguf.GGMLQuantizationType[kind])
            writer.add_tensor(name, quantized, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(params: lsjax.Params) -> dict:
    """The weights as llama.cpp's converter names and lays them out."""
    config, tensors = params.config, {}
    for path, leaf in flatten(params.tree).items():
        *_, module, kind = path.split("/")
        layer = path.split("/")[0].removeprefix("layers_") if path.startswith("layers_") else None
        prefix, suffix = "" if layer is None else f"blk.{layer}.", ".bias" if kind == "bias" else ".weight"
        value = np.asarray(leaf).T if kind == "kernel" else np.asarray(leaf)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(module)
        tensors[prefix + GGUF_NAMES[module] + suffix] = np.ascontiguousarray(
            value if heads is None else interleave(value, heads)
        )
    return tensors
