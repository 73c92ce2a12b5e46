"""The network of tinylm: its shape, its start, its training loss and its files."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

from tinylm import codec

MAX_LENGTH = 4352


def model_config(length: int = MAX_LENGTH) -> LlamaConfig:
    """The architecture for `length` tokens: 6 layers of width 256, 4 heads of 64 over 2 key-value heads."""
    return LlamaConfig(
        vocab_size=codec.VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=length,
        tie_word_embeddings=True,
        bos_token_id=codec.BOS,
        eos_token_id=codec.EOS,
        pad_token_id=codec.PAD,
        initializer_range=0.02,
    )


def new_model(seed: int, length: int = MAX_LENGTH) -> LlamaForCausalLM:
    """A freshly initialized model of `length` tokens in float32."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(model_config(length))
    # Each layer adds twice to the residual stream: keep its size at the start.
    shrink = 1 / math.sqrt(2 * model.config.num_hidden_layers)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(shrink)
            layer.mlp.down_proj.weight.mul_(shrink)
    return model


def loss_function(model: LlamaForCausalLM) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """A function of (ids (B, T + 1), weights (B, T), rotary tables) to the losses.

    It gives the weighted mean to train on, and the means over text and over answers. The
    layers are called one by one and with no mask, because older releases of Transformers build
    a whole mask under torch.compile, which rules the flash kernel out.
    """

    def losses(
        ids: torch.Tensor, weights: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = model.model.embed_tokens(ids[:, :-1])
        for layer in model.model.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
        logits = model.lm_head(model.model.norm(hidden))
        each = cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        scale = weights.flatten().float()
        answer = (scale > 1).float()
        text = 1 - answer
        parts = torch.stack(
            (
                (each * text).sum() / text.sum().clamp(min=1),
                (each * answer).sum() / answer.sum().clamp(min=1),
            )
        )
        return (each * scale).sum() / scale.sum(), parts.detach()

    return losses


def save(model: LlamaForCausalLM, out: Path) -> LlamaForCausalLM:
    """Writes the folder in bfloat16 and returns the model as it loads from there."""
    out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(out)
    GenerationConfig(
        bos_token_id=codec.BOS, eos_token_id=codec.EOS, pad_token_id=codec.PAD, do_sample=False
    ).save_pretrained(out)
    return LlamaForCausalLM.from_pretrained(out).eval()
