"""Shrink: makes a tiny configuration of any transformers model type, without the network and without a list of models.

The type's default configuration is built again with small sizes. Families name a size differently but mean the same. Lists with one entry
per layer (layer types, windows) keep one layer of every kind, so that a model with sliding and full layers shows both.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

LAYERS = 2
MOST_KINDS = 4
SIZES: Mapping[str, int] = {
    "hidden_size": 256, "n_embd": 256, "d_model": 256, "dim": 256, "word_embed_proj_dim": 256, "ffn_dim": 512, "ffn_hidden_size": 512,
    "intermediate_size": 512, "n_inner": 512, "mlp_dim": 512, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "num_key_value_heads": 2, "num_kv_heads": 2, "head_dim": 64, "vocab_size": 512, "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128, "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "q_lora_rank": 64, "kv_lora_rank": 64, "sliding_window": 16, "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 512, "first_k_dense_replace": 1, "rotary_dim": 32, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2, "d_ff": 512, "d_kv": 64, "encoder_ffn_dim": 512, "decoder_ffn_dim": 512, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4, "attention_heads": 4,
    "attention_chunk_size": 16, "attention_window_size": 16, "sliding_window_size": 16, "local_attention": 16,
    "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1,
}
LAYER_COUNTS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks")
STACK_COUNTS = ("encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers")


def _known(config: Any) -> dict[str, Any]:
    """Return every setting of a configuration; the stored value if reading the attribute raises, as for values that differ by layer."""
    known = {}
    for name, value in config.to_dict().items():
        try:
            known[name] = getattr(config, name, value)
        except Exception as error:  # noqa: BLE001  a class of its own in transformers
            log.debug("%s of a configuration cannot be read: %s", name, error)
            known[name] = value
    return known


def _chosen_layers(lists: Mapping[str, list[Any]], count: int, wanted: int, twice: bool) -> list[int]:
    """Return the indices of layers to keep: the first of every kind (``twice``: and the last), then others in order up to ``wanted``."""
    first: dict[tuple[str, ...], int] = {}
    last: dict[tuple[str, ...], int] = {}
    for index in range(count):
        kind = tuple(str(values[index]) for values in lists.values())
        first.setdefault(kind, index)
        last[kind] = index
    kept = sorted({*first.values(), *(last.values() if twice else ())})
    return sorted([*kept, *[index for index in range(count) if index not in kept][: max(0, wanted - len(kept))]])


def small_sizes(config: Any, layers: int = LAYERS) -> dict[str, Any]:
    """Return the options with which the configuration's class makes a tiny model of the same structure, of about ``layers`` layers."""
    known = _known(config)
    small: dict[str, Any] = {
        name: size for name, size in SIZES.items()
        if name.endswith("_token_id") or (known.get(name) is not None and not isinstance(known[name], (bool, list, dict)))
    }
    # Some classes leave these None by default and then fail on them.
    small |= {name: size for name, size in (("head_dim", 64), ("num_key_value_heads", 4)) if name in known and known[name] is None}
    if "kv_lora_rank" in known:
        # Latent attention expands to as many kv heads as query heads, and derives its head dim.
        small.pop("head_dim", None)
        small["num_key_value_heads"] = small["num_attention_heads"]
    small |= {name: layers for name in STACK_COUNTS if isinstance(known.get(name), int)}
    parts = {name: tiny_config(getattr(config, name), layers) for name in getattr(config, "sub_configs", ()) if getattr(config, name, None)}
    small |= parts
    count_name = next((name for name in LAYER_COUNTS if isinstance(known.get(name), int)), None)
    if count_name is None:
        return small
    count = known[count_name]
    # A list with more distinct entries is no list of kinds; the class derives it again.
    lists = {
        name: value for name, value in known.items()
        if isinstance(value, list) and count > layers and len(value) == count and len({str(item) for item in value}) <= MOST_KINDS
    }
    # The last layers may read keys and values that earlier layers of their kind stored.
    sharing = bool(known.get("num_kv_shared_layers"))
    kept = _chosen_layers(lists, count, layers, twice=sharing)
    small[count_name] = len(kept)
    small |= {name: [value[index] for index in kept] for name, value in lists.items()}
    if sharing:
        small["num_kv_shared_layers"] = len(kept) // 2
    return small


def tiny_config(config: Any, layers: int = LAYERS, given: Mapping[str, Any] | None = None) -> Any:
    """Return a tiny configuration of the class of ``config``, with the values of ``given`` fixed. Raises that class's exceptions."""
    small = small_sizes(config, layers) | dict(given or {})
    try:
        return type(config)(**small)
    except Exception as error:
        # A class may constrain its sizes: leave one of them at the class's default.
        log.debug("%s does not take all the small sizes: %s", type(config).__name__, error)
        for name in sorted(SIZES.keys() & small.keys()):
            with contextlib.suppress(Exception):
                return type(config)(**{key: value for key, value in small.items() if key != name})
        raise
