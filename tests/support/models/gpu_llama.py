"""The small Llama of tests on a GPU: two layers whose heads have the size of real ones."""

from __future__ import annotations

import torch
import transformers

LAYERS, HEADS, KV, DIM = 2, 8, 2, 128


def gpu_config() -> transformers.LlamaConfig:
    """Its configuration; 512 words."""
    return transformers.LlamaConfig(
        hidden_size=512, intermediate_size=512, num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV,
        head_dim=DIM, vocab_size=512, max_position_embeddings=65536,
    )


def gpu_model(config: transformers.LlamaConfig) -> torch.nn.Module:
    """A model of the configuration with weights of seed 0, in bfloat16 on the device."""
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
