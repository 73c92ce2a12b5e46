"""Laws of compressed caches: a compiled attention fills one, and one that was cropped, reordered, copied or saved can be continued."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from kvcompile.backend import backend
from kvcompile.runtime.handle.tensor import CompressedCache, decoded
from kvcompile.schemes import Scheme
from kvcompile.testing.laws import Over, law, unlike
from kvcompile.testing.samples import fitting, normal
from kvcompile.testing.storage import store_error
from kvcompile.types import Role

HEADS, GROUPS, ROWS, CAPACITY = 2, 2, 3, 200
PROMPT, STEPS = 100, (1, 1, 3, 30, 1)
CROPPED = 3
"""Tokens that are taken back; no window is so small."""


class Buffers(nn.Module):
    """One attention over buffers of a fixed capacity."""

    k: torch.Tensor
    v: torch.Tensor

    def __init__(self, rows: int, head_dim: int, capacity: int = CAPACITY) -> None:
        super().__init__()
        for name in ("k", "v"):
            self.register_buffer(name, torch.zeros(rows, HEADS, capacity, head_dim, device="cpu"))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        """Write keys and values at positions ``pos`` [S] in place; return attention over all tokens up to each query's own."""
        keys, values = self.k.index_copy_(2, pos, k), self.v.index_copy_(2, pos, v)
        seen = torch.arange(keys.shape[2], device="cpu") <= pos[:, None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)


class Grown(nn.Module):
    """One attention over keys and values that every call appends to; it computes them from its inputs, times the buffer ``one`` (1.0)."""

    one: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("one", torch.ones((), device="cpu"))

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, past: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Return (attention over all tokens up to each query's own, the cache): ``past`` with keys and values appended."""
        keys, values = k * self.one, v * self.one
        if past is not None:
            keys, values = torch.cat([past[0], keys], 2), torch.cat([past[1], values], 2)
        tokens = keys.shape[2]
        seen = torch.arange(tokens, device="cpu") <= torch.arange(tokens - q.shape[2], tokens, device="cpu")[:, None]
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True), (keys, values)


def inputs(head_dim: int, tokens: int, seed: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return random queries [B, H, tokens, D], keys and values [B, K, tokens, D] of a sequence, drawn by ``seed``."""
    q, k, v = (normal(ROWS, heads, tokens, head_dim, seed=seed + at) for at, heads in enumerate((HEADS * GROUPS, HEADS, HEADS)))
    return q / 4, k, v


def compiled(module: nn.Module, scheme: Scheme, inner: str = "eager") -> Callable[..., Any]:
    """Return a module over a cache, compiled with ``scheme``, which raises SiteRefused when called if its attention is not rewritten.

    Resets the compiler. ``inner``: the compiler of the rewritten graph.
    """
    torch.compiler.reset()
    return torch.compile(module, backend=backend(scheme, inner=inner, strict=True))


def grown(scheme: Scheme, calls: tuple[int, ...]) -> tuple[Callable[..., Any], list[torch.Tensor], tuple[torch.Tensor, ...]]:
    """Return (attention over a growing cache, compiled; its caches after ``calls``; the inputs).

    Each call has that many random tokens. Raises Unlike if a cache is not compressed.
    """
    run = compiled(Grown(), scheme)
    given = inputs(fitting(scheme).head_dim, sum(calls))
    past: tuple[torch.Tensor, ...] | None = None
    start = 0
    with torch.no_grad():
        for count in calls:
            _, past = run(*(x[:, :, start : start + count] for x in given), past)
            start += count
    assert past is not None
    for cache in past:
        if not isinstance(cache, CompressedCache):
            unlike("a compressed cache", type(cache).__name__)
    return run, list(past), given


def hold(scheme: Scheme, caches: list[torch.Tensor], expected: tuple[torch.Tensor, ...], roundings: int = 1) -> None:
    """Check that caches decode to the ``expected`` tokens, within ``roundings`` times the scheme's error bound. Raises Unlike.

    Of a scheme without a bound, only the shape and the absence of NaN and Inf are checked.
    """
    for cache, x, role in zip(caches, expected, Role, strict=True):
        made, found = scheme.for_role(role), decoded(cache)
        if found.shape != x.shape:
            unlike(f"a cache of {x.shape[2]} tokens", f"one of {found.shape[2]}")
        if made.bound(fitting(made)) is None:
            if not torch.isfinite(found).all():
                unlike("numbers", "NaN or Inf in a cache")
            continue
        assert isinstance(cache, CompressedCache)
        store = next(iter(cache._kv.stores.values()))
        allowed = roundings * store_error(made, store, x) + 1e-6
        error = (found - x).double()
        error = error.abs() if made.rotation(store.spec.slot) is None else torch.linalg.vector_norm(error, dim=-1, keepdim=True)
        if not (error <= allowed).all():
            unlike(f"the tokens of a cache within {roundings} times the bound", f"{float((error - allowed).max()):.3g} over it")


@law(Over.CACHES, "let what a store decodes to be what attention was given, in calls of any length")
def a_compiled_attention_fills_a_cache(scheme: Scheme) -> None:
    """Check that the caches of a compiled attention hold a prompt and steps, over a cache of fixed capacity and over a growing one.

    Over the fixed capacity, results must be finite and of the dense attention's shape, and those of the prompt close to its results if the
    scheme does not read codes in the prompt. Raises Unlike.
    """
    _, caches, (_, keys, values) = grown(scheme, (PROMPT, *STEPS))
    hold(scheme, caches, (keys, values))
    width = fitting(scheme).head_dim
    module = Buffers(ROWS, width)
    run, given, start = compiled(module, scheme), inputs(width, PROMPT + sum(STEPS)), 0
    exact = F.scaled_dot_product_attention(*given, is_causal=True, enable_gqa=True)
    with torch.no_grad():
        for count in (PROMPT, *STEPS):
            part = slice(start, start + count)
            found = run(*(x[:, :, part] for x in given), torch.arange(start, start + count, device="cpu"))
            start += count
            if not torch.isfinite(found).all() or found.shape != exact[:, :, part].shape:
                unlike("numbers of the dense attention's shape", f"{tuple(found.shape)}, all finite: {bool(torch.isfinite(found).all())}")
            first = (found - exact[:, :, part]).abs().max()
            if count == PROMPT and not scheme.prefill_reads_codes and not first <= 1e-4:
                unlike("a first call that attends to its own tokens in full precision", f"an error of {float(first):.3g}")


@law(Over.CACHES, "let the scheme be made again from its fields: dataclasses and enums of plain values, defined in a module")
def a_saved_cache_comes_back(scheme: Scheme) -> None:
    """Check that a cache decodes to the same values after ``torch.save`` and ``torch.load`` (``weights_only``), and after a deep copy.

    Raises Unlike.
    """
    _, caches, _ = grown(scheme, (PROMPT, 1))
    for cache in caches:
        file = io.BytesIO()
        torch.save({"cache": cache}, file)
        file.seek(0)
        for back in (torch.load(file)["cache"], copy.deepcopy(cache)):
            if type(back) is not type(cache) or repr(back) != repr(cache):
                unlike(repr(cache), repr(back))
            if not torch.equal(decoded(back), decoded(cache)):
                unlike("the values that were saved", "others")


@law(Over.CACHES, "let a token's codes depend on its own batch row alone, and `layout` give every plane its batch rows")
def a_reordered_cache_holds_its_rows(scheme: Scheme) -> None:
    """Check that batch rows selected by ``index_select``, as for beams, decode unchanged, and that a step extends them; raises Unlike."""
    run, caches, (q, keys, values) = grown(scheme, (PROMPT, 1))
    rows = torch.tensor([2, 0, 0], device="cpu")
    before = [decoded(cache) for cache in caches]
    chosen = [cache.index_select(0, rows) for cache in caches]
    for cache, dense in zip(chosen, before, strict=True):
        if not torch.equal(decoded(cache), dense[rows]):
            unlike("the rows that were selected", "others")
    with torch.no_grad():
        _, past = run(*(x[:, :, :1] for x in (q, keys, values)), tuple(chosen))
    hold(scheme, list(past), tuple(torch.cat([x[rows], x[:, :, :1]], 2) for x in (keys, values)))


@law(Over.CACHES, "encode a block once its last token is there, from its full-precision tokens in the window")
def a_cropped_cache_goes_on(scheme: Scheme) -> None:
    """Check that tokens cropped from a cache, such as a rejected draft, are replaced by the next tokens; raises Unlike.

    Schemes that need tokens in order and have no window are not checked: they cannot take tokens back.
    """
    if scheme.in_order and not (scheme.window or scheme.for_role(Role.KEY).window):
        return
    run, caches, (q, keys, values) = grown(scheme, (PROMPT, CROPPED, 1))
    kept = PROMPT + 1
    short = tuple(cache[:, :, :kept] for cache in caches)
    with torch.no_grad():
        _, past = run(*(-x[:, :, kept : kept + CROPPED] for x in (q, keys, values)), short)
    expected = tuple(torch.cat([x[:, :, :kept], -x[:, :, kept : kept + CROPPED]], 2) for x in (keys, values))
    hold(scheme, list(past), expected, roundings=2)
