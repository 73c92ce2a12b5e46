"""A checkpoint folder that is made here: a byte-level tokenizer trained on a little text, and a small llama."""

from __future__ import annotations

from pathlib import Path

import pytest

WORDS = "the a note of value and code is number recall each all counts word seen trace common frequent"


@pytest.fixture(scope="session")
def book(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text with short lines, which is what prompts are filled with."""
    words = WORDS.split()
    lines = (" ".join(words[(7 * line + 3 * at) % len(words)] for at in range(4 + line % 5)) for line in range(900))
    path = tmp_path_factory.mktemp("text") / "book.txt"
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, book: Path) -> Path:
    """A llama of two layers with random weights, and its tokenizer with merges, a start token and an end token."""
    import torch
    from tokenizers import ByteLevelBPETokenizer
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("checkpoint")
    trained = ByteLevelBPETokenizer()
    trained.train([str(book)], vocab_size=400, special_tokens=["<s>", "</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=trained._tokenizer, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, max_position_embeddings=1024, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder
