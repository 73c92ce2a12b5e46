"""Caches whose first write is their last: the keys and values of cross-attention take the pages of their tokens, and no reserve."""

from __future__ import annotations

import pytest
import torch

import kvcompile
from kvcompile.types import PAGE

ROWS, SOUNDS, WIDTH, LAYERS = 3, 20, 64, 2


@pytest.mark.usefixtures("fresh_dynamo")
def test_whisper_keeps_what_it_hears_in_the_least_pages() -> None:
    """Two pages of each cross cache, of int8 codes and a float16 scale for each token and head; self-attention has its reserve."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=64, d_model=WIDTH, encoder_layers=1, decoder_layers=LAYERS, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, num_mel_bins=8, max_source_positions=SOUNDS, max_target_positions=64, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None,
    )
    model = transformers.WhisperForConditionalGeneration(config).eval().model
    backend = kvcompile.backend("int8", inner="eager")
    compiled = torch.compile(model.decoder, backend=backend)
    caches = [transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache()) for _ in "ab"]
    with torch.no_grad():
        heard = model.encoder(torch.randn(ROWS, 8, 2 * SOUNDS)).last_hidden_state
        for count in (4, 1, 1, 1):
            ids = torch.randint(3, 64, (ROWS, count))
            expected, found = (
                run(input_ids=ids, encoder_hidden_states=heard, past_key_values=held).last_hidden_state
                for run, held in zip((model.decoder, compiled), caches, strict=True)
            )
            torch.testing.assert_close(found, expected, atol=0.05, rtol=0.05)
    assert not backend.report().refusals
    layers = (held.layers[0] for held in (caches[1].self_attention_cache, caches[1].cross_attention_cache))
    own, cross = ([layer.keys, layer.values] for layer in layers)
    assert [_stored(cache) for cache in cross] == [2 * _page()] * 2
    assert [_stored(cache) for cache in own] == [4 * _page()] * 2


def _stored(cache: torch.Tensor) -> int:
    """Bytes of the planes behind a compressed cache."""
    return sum(store.nbytes for store in cache._kv.stores.values())


def _page() -> int:
    """Bytes of 64 tokens of all rows."""
    return PAGE * ROWS * (WIDTH + 2 * 2)


@pytest.mark.parametrize("whole", [False, True], ids=["decoder", "encoder and decoder"])
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_step_is_explained_beside_what_the_encoder_gave(whole: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(vocab_size=64, d_model=WIDTH, d_kv=32, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0)
    model = transformers.T5ForConditionalGeneration(config).eval()
    ids = torch.randint(3, 64, (1, 9))
    given = {"input_ids": torch.randint(3, 64, (1, SOUNDS)), "decoder_input_ids": ids, "attention_mask": torch.ones(1, SOUNDS)}
    if not whole:
        given = {"input_ids": ids, "encoder_hidden_states": torch.randn(1, SOUNDS, WIDTH), "attention_mask": torch.ones(1, 9)}
    prompt, step = kvcompile.explain(model if whole else model.decoder, {**given, "use_cache": True}).graphs
    assert [site.tokens for site in (*prompt.sites, *step.sites)] == [9, 9, 1, 1]
    assert ["not written" in site.write + site.cache for site in step.sites] == [False, True]
