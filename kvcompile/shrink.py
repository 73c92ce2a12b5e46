"""Shrink: a tiny configuration of any transformers model type, without the network and without a list of models.

The default configuration of the type is built again with small sizes under whatever names it uses for them;
what a size is called differs between families, what it means does not. Lists with one entry a layer (layer
types, windows) keep one layer of every kind, so that a model with sliding and full layers shows both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LAYERS = 2
MOST_KINDS = 4
SIZES: Mapping[str, int] = {
    "hidden_size": 256, "n_embd": 256, "d_model": 256, "dim": 256, "word_embed_proj_dim": 256, "ffn_dim": 512, "ffn_hidden_size": 512,
    "intermediate_size": 512, "n_inner": 512, "mlp_dim": 512, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 64, "vocab_size": 512, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 64, "kv_lora_rank": 64, "sliding_window": 16, "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 512, "first_k_dense_replace": 1, "rotary_dim": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def _layer_count_name(known: Mapping[str, Any]) -> str | None:
    return next((name for name in LAYER_COUNTS if isinstance(known.get(name), int)), None)


def _chosen_layers(lists: Mapping[str, list[Any]], count: int) -> list[int]:
    """Indices of the layers to keep: the first of every kind, then others in order up to ``LAYERS``."""
    first: dict[tuple[str, ...], int] = {}
    for index in range(count):
        first.setdefault(tuple(str(values[index]) for values in lists.values()), index)
    kept = list(first.values())
    kept += [index for index in range(count) if index not in kept][: max(0, LAYERS - len(kept))]
    return sorted(kept)


def small_sizes(config: Any) -> dict[str, Any]:
    """What to build the configuration's class with to get a tiny model of the same structure."""
    known = {name: getattr(config, name, value) for name, value in config.to_dict().items()}
    small: dict[str, Any] = {
        name: size for name, size in SIZES.items()
        if name.endswith("_token_id") or (known.get(name) is not None and not isinstance(known[name], (bool, list, dict)))
    }
    # What some classes leave open in their defaults, and then stumble over.
    small |= {name: size for name, size in (("head_dim", 64), ("num_key_value_heads", 4)) if name in known and known[name] is None}
    if "kv_lora_rank" in known:
        # Latent attention expands to as many kv heads as query heads, and derives its head dim.
        small.pop("head_dim", None)
        small["num_key_value_heads"] = small["num_attention_heads"]
    count_name = _layer_count_name(known)
    if count_name is None:
        return small
    count = known[count_name]
    # A list of as many different entries is no list of kinds; its class derives it again.
    lists = {
        name: value for name, value in known.items()
        if isinstance(value, list) and count > LAYERS and len(value) == count and len({str(item) for item in value}) <= MOST_KINDS
    }
    kept = _chosen_layers(lists, count)
    small[count_name] = len(kept)
    small |= {name: [value[index] for index in kept] for name, value in lists.items()}
    return small


def tiny_config(config: Any) -> Any:
    """A tiny configuration of the same class as ``config``; raises whatever that class raises."""
    return type(config)(**small_sizes(config))
