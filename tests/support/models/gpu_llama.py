"""The small Llama of tests on a GPU: two layers whose heads have the size of real ones; and one whose queries lie in few directions."""

from __future__ import annotations

import torch
import transformers

LAYERS, HEADS, KV, DIM = 2, 8, 2, 128
STRONG, GAIN = 8, 8.0
"""How many of a head's 64 pairs of RoPE have strong queries in a narrow model, and how strong they are."""


def gpu_config() -> transformers.LlamaConfig:
    """Its configuration; 512 words."""
    return transformers.LlamaConfig(
        hidden_size=512, intermediate_size=512, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV,
        head_dim=DIM, vocab_size=512, max_position_embeddings=65536,
    )


def gpu_model(config: transformers.LlamaConfig, device: str = "cuda") -> torch.nn.Module:
    """A model of the configuration with weights of seed 0, in bfloat16 on the device."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(device, torch.bfloat16).eval()


def narrow_model(config: transformers.LlamaConfig, device: str = "cuda") -> torch.nn.Module:
    """The same model with queries that lie mostly in a few channels of each head.

    Queries of random weights point everywhere alike: nothing can be learned from them, and squat's guard declines what is.
    """
    model = gpu_model(config, device)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.view(HEADS, 2, DIM // 2, -1)[:, :, :STRONG] *= GAIN
    return model
