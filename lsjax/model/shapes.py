"""The arrays of a Llama and their shapes, from its configuration alone; without JAX, so that it is quick to ask."""

from __future__ import annotations

from lsjax.config import LlamaConfig


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every array that ``Llama(config).init`` makes, ``{"layers_0/mlp/up_proj/kernel": (hidden, intermediate), ...}``.

    Kernels are ``[in, out]``.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    products = {
        "self_attn/q_proj": (hidden, queries, config.attention_bias),
        "self_attn/k_proj": (hidden, keys, config.attention_bias),
        "self_attn/v_proj": (hidden, keys, config.attention_bias),
        "self_attn/o_proj": (queries, hidden, config.attention_bias),
        "mlp/gate_proj": (hidden, inner, config.mlp_bias),
        "mlp/up_proj": (hidden, inner, config.mlp_bias),
        "mlp/down_proj": (inner, hidden, config.mlp_bias),
    }
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm/scale": (hidden,),
        "post_attention_layernorm/scale": (hidden,),
    }
    for name, (rows, columns, has_bias) in products.items():
        layer[f"{name}/kernel"] = (rows, columns)
        if has_bias:
            layer[f"{name}/bias"] = (columns,)
    found: dict[str, tuple[int, ...]] = {"embed_tokens/embedding": (config.vocab_size, hidden), "norm/scale": (hidden,)}
    if not config.tie_word_embeddings:
        found["lm_head/kernel"] = (hidden, config.vocab_size)
    found |= {
        f"layers_{number}/{path}": shape for number in range(config.num_hidden_layers) for path, shape in layer.items()
    }
    return found
