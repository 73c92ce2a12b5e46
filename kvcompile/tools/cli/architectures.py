"""Architectures: a tiny random model of every decoder type in the installed transformers, and how to call it.

Models are built from configurations only: nothing is downloaded and no architecture is listed here. A name is a model type, such as
``llama``; an encoder-decoder model is ``bart+encoder``, because many types have both forms.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.tools.cli.shrink import tiny_config

WITH_ENCODER = "+encoder"
SOURCE_TOKENS = 13
ROPE = {"rope_type": "default", "rope_theta": 1e4}
OPEN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"num_expert_group": 1, "num_experts_per_token": 2, "num_experts_per_tok": 2},
    "bamba": {"attn_layer_indices": [1], "num_hidden_layers": 2},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2},
    "kimi_linear": {"num_experts_per_token": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_hidden_layers": 2},
    "mamba2": {"expand": 1, "n_groups": 1},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "num_hidden_layers": 4},
}
"""Settings that a type's default configuration leaves unset, or too large for a tiny model, under names that ``shrink.SIZES`` does not
have."""
NEUTRAL = 0.06
"""Standard deviation of weights at which activations of 256 channels keep their magnitude, so that attention influences the logits."""


@dataclass(frozen=True)
class TinyModel:
    """One tiny model and how to call it: the caches that it takes, and the inputs other than tokens."""

    name: str
    model: Any
    encoded: bool

    def static_cache(self, capacity: int) -> Any:
        """Return an empty static cache of ``capacity`` tokens."""
        from transformers import EncoderDecoderCache, StaticCache

        config = self.model.config.get_text_config(decoder=True)
        cache = StaticCache(config=config, max_cache_len=capacity)
        return EncoderDecoderCache(cache, StaticCache(config=config, max_cache_len=SOURCE_TOKENS)) if self.encoded else cache

    def dynamic_cache(self) -> Any:
        """Return an empty dynamic cache; None if the model makes its own."""
        from transformers import DynamicCache, EncoderDecoderCache

        config = self.model.config.get_text_config(decoder=True)
        return EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config)) if self.encoded else None

    def inputs(self, tokens: torch.Tensor, mask: torch.Tensor | None, seed: int = 0) -> dict[str, Any]:
        """Return the keyword arguments of one call for new ``tokens`` and a padding ``mask`` over all tokens so far; None: no padding."""
        if not self.encoded:
            return {"input_ids": tokens} | ({"attention_mask": mask} if mask is not None else {})
        from transformers.modeling_outputs import MoEModelOutput

        generator = torch.Generator().manual_seed(seed)
        states = torch.randn(tokens.shape[0], SOURCE_TOKENS, self._encoder_width(), generator=generator, device="cpu")
        given: dict[str, Any] = {"decoder_input_ids": tokens, "encoder_outputs": MoEModelOutput(last_hidden_state=states)}
        return given | ({"decoder_attention_mask": mask} if mask is not None else {})

    def _encoder_width(self) -> int:
        config = self.model.config
        encoder = getattr(config, "encoder", None)
        names = ("hidden_size", "d_model")
        return next(
            int(getattr(part, name)) for part in (getattr(encoder, "text_config", None), encoder, config) if part is not None
            for name in names if getattr(part, name, None)
        )

    @property
    def vocabulary(self) -> int:
        """Vocabulary size of the decoder."""
        return int(self.model.config.get_text_config(decoder=True).vocab_size)


def names() -> list[str]:
    """Return every text-generating architecture of the installed transformers, each under one name."""
    from transformers import CONFIG_MAPPING
    from transformers.models.auto import modeling_auto

    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    paired = modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES
    found = []
    for name in causal:
        inner = name
        with contextlib.suppress(Exception):
            inner = CONFIG_MAPPING[name]().get_text_config(decoder=True).model_type
        # Skip a type whose text part is itself a listed type: it would be the same model twice.
        if inner == name or inner not in causal:
            found.append(name)
    both = sorted(name + WITH_ENCODER for name in paired if _has_encoder(name))
    return sorted({*found, *(name for name in paired if not _has_encoder(name))}) + both


def _has_encoder(name: str) -> bool:
    from transformers import CONFIG_MAPPING

    # A type composed of two others has no default configuration and raises ValueError.
    with contextlib.suppress(ValueError):
        return bool(getattr(CONFIG_MAPPING[name](), "is_encoder_decoder", False))
    return False


def build(name: str, attention: str, layers: int = 2, sizes: Callable[[Any], Mapping[str, Any]] | None = None) -> TinyModel:
    """Return a tiny random model of the architecture ``name``, of ``layers`` layers or little more, in evaluation mode.

    ``attention``: its implementation in transformers. ``sizes``: maps the type's default configuration to further settings for the tiny
    one. Raises the exceptions of the model's classes.
    """
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM

    kind = name.removesuffix(WITH_ENCODER)
    config, paired = CONFIG_MAPPING[kind](), kind != name
    inner = config if config.is_encoder_decoder else config.get_text_config(decoder=True)
    known = AutoModelForCausalLM._model_mapping
    config = inner if type(inner) in known and not paired else config
    config = tiny_config(config, layers, {**OPEN.get(kind, {}), **(sizes(config) if sizes is not None else {})})
    auto = AutoModelForSeq2SeqLM if paired or type(config) not in known else AutoModelForCausalLM
    if not paired and getattr(config, "is_decoder", None) is False:
        config.is_decoder = True
    for part in _parts(config):
        for field in ("initializer_range", "init_std"):
            if isinstance(getattr(part, field, None), float):
                setattr(part, field, NEUTRAL)
    torch.manual_seed(0)
    make: Callable[..., Any] = auto.from_config
    model = make(config, dtype=torch.float32, attn_implementation=attention).eval()
    if hasattr(model, "set_default_language"):
        model.set_default_language(next(iter(config.languages)))
    _stir(model)
    return TinyModel(name, model, bool(paired and model.config.is_encoder_decoder))


def _parts(config: Any) -> list[Any]:
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", ())]
    return [config, *[part for item in inner if item is not None for part in _parts(item)]]


@torch.no_grad()
def _stir(model: torch.nn.Module) -> None:
    """Add noise to one-dimensional parameters (biases, norms, sinks), which start as zeros or ones.

    Otherwise a rewrite that leaves one out would not change the logits.
    """
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.dim() == 1:
            parameter.add_(torch.randn(parameter.shape, generator=generator, device="cpu"), alpha=0.05)
