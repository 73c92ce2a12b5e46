"""Oracles: the uncompiled model over a cache whose values have been through a scheme's eager ``encode`` and ``decode``.

With such a reference an error of a kernel cannot hide under the error of quantization: what remains between the two is
rounding. Two forms, by what a scheme's codes depend on:

* by token: ``Cache.update`` rounds what it stores. The prompt may be attended to as it is (the compiled model's cache was
  empty) or as codes; both are what the scheme promises, so both references are made.
* by block, the newest tokens exact: before each step the tokens that have left the window are replaced by their decoded
  block, made from the originals, and blocks are counted from each row's first token that is no padding.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.accept.axes import Case, Dtype, Prompt, Trait
from kvcompile import schemes
from kvcompile.schemes import Scheme
from kvcompile.schemes.rotation import rotate, unrotate
from kvcompile.types import Role, SlotSpec


def scheme_of(case: Case, role: Role) -> Scheme:
    """Return the scheme that holds a case's keys or values; a latent is stored in the form that values have, by the keys' scheme."""
    spec = case.scheme.spec(int(case.head_dim))
    if Trait.LATENT in case.architecture.traits:
        return schemes.parse(spec["k"]).for_role(Role.VALUE)
    return schemes.parse(spec["k" if role is Role.KEY else "v"]).for_role(role)


def round_trip(scheme: Scheme, x_BKSD: torch.Tensor, role: Role) -> torch.Tensor:
    """Return what the codes of ``x`` decode to, in the dtype of ``x``."""
    if not x_BKSD.shape[2]:
        return x_BKSD
    spec = SlotSpec(x_BKSD.shape[1], x_BKSD.shape[3], x_BKSD.dtype, role)
    rotation = scheme.rotation(spec)
    if rotation is None:
        return scheme.decode(scheme.encode(x_BKSD), spec).to(x_BKSD.dtype)
    decoded = scheme.decode(scheme.encode(rotate(x_BKSD, rotation.order, None)), spec).to(x_BKSD.dtype)
    return unrotate(decoded, rotation.order, None)


def _layers(past: Any) -> list[tuple[Any, bool]]:
    """Return the layers of a cache that hold keys and values, each with whether it is the read-only half of an encoder's."""
    found = [(layer, False) for layer in getattr(past, "self_attention_cache", past).layers]
    if hasattr(past, "cross_attention_cache"):
        found += [(layer, True) for layer in past.cross_attention_cache.layers]
    return [(layer, cross) for layer, cross in found if getattr(layer, "keys", None) is not None and layer.keys.numel()]


def _goes_around(layer: Any) -> bool:
    return bool(getattr(layer, "is_sliding", False))


class Oracle:
    """Hooks on an uncompiled transformers model that keep its cache as a case's scheme would give it back."""

    def __init__(self, case: Case, codes_in_prompt: bool = False) -> None:
        self.keys, self.values = scheme_of(case, Role.KEY), scheme_of(case, Role.VALUE)
        shown = Trait.HALF_MASK in case.architecture.traits and case.dtype is Dtype.FP16
        self.pads, self.codes_in_prompt = tuple(0 if shown else pad for pad in case.batch.pads), codes_in_prompt
        # An encoder's keys and values that uncompiled code filled stay as they are: see ``cases.refusal``.
        self.cross = case.prompt is Prompt.COMPILED
        self.by_token = self.keys.window == self.values.window == 0
        key_role = Role.VALUE if Trait.LATENT in case.architecture.traits else Role.KEY
        self.roles = ((self.keys, "keys", key_role), (self.values, "values", Role.VALUE))
        self._restart(None)

    def _restart(self, past: Any) -> None:
        self.past, self.length, self.inside = past, 0, self.codes_in_prompt
        self.originals: dict[tuple[int, str], torch.Tensor] = {}

    @contextlib.contextmanager
    def on(self, model: torch.nn.Module) -> Iterator[None]:
        """Keep every cache that ``model`` is called with."""
        from transformers import Cache

        plain = Cache.update

        def update(cache: Any, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            if self.by_token and self.inside:
                key_states = self._rounded(self.keys, key_states, self.roles[0][2], self.length)
                value_states = self._rounded(self.values, value_states, Role.VALUE, self.length)
            return plain(cache, key_states, value_states, layer_idx, *args, **kwargs)

        before = model.register_forward_pre_hook(self._before, with_kwargs=True)
        after = model.register_forward_hook(self._after, with_kwargs=True)
        try:
            with unittest.mock.patch.object(Cache, "update", update):
                yield
        finally:
            before.remove()
            after.remove()

    def _before(self, model: Any, args: Any, kwargs: dict[str, Any]) -> None:
        past = kwargs.get("past_key_values")
        if past is None or past is not self.past:
            self._restart(past)
            return
        if not self.by_token:
            self._settle(past)

    def _after(self, model: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        words = kwargs.get("decoder_input_ids", kwargs.get("input_ids"))
        self.past = out.past_key_values
        self.length += words.shape[1]
        if self.by_token and not self.inside:
            for layer in [layer for layer, cross in _layers(self.past) if self.cross or not cross]:
                for scheme, name, role in self.roles:
                    setattr(layer, name, self._rounded(scheme, getattr(layer, name), role, 0))
        self.inside = True

    def _rounded(self, scheme: Scheme, x_BKSD: torch.Tensor, role: Role, start: int) -> torch.Tensor:
        """Return tokens from position ``start`` on as a store of codes alone gives them back, first ones that stay exact as they are."""
        found = round_trip(scheme, x_BKSD, role)
        sinks = max(self.keys.sinks, self.values.sinks)
        for row, pad in enumerate(self.pads):
            first = slice(max(pad - start, 0), max(pad + sinks - start, 0))
            found[row, :, first] = x_BKSD[row, :, first]
        return found

    def _settle(self, past: Any) -> None:
        """Replace the tokens that have left the window by what their blocks decode to."""
        window = max(self.keys.window, self.values.window)
        for number, (layer, cross) in enumerate(_layers(past)):
            # These stay as they are: see ``cases.refusal``.
            if cross or _goes_around(layer):
                continue
            for scheme, name, role in self.roles:
                held = getattr(layer, name)
                known = self.originals.get((number, name), held[:, :, :0])
                original = torch.cat([known, held[:, :, known.shape[2] : self.length]], dim=2).clone()
                self.originals[number, name] = original
                behind = self.length - window
                if behind > 0:
                    held[:, :, :behind] = self._decoded(scheme, original, role)[:, :, :behind]

    def _decoded(self, scheme: Scheme, x_BKTD: torch.Tensor, role: Role) -> torch.Tensor:
        result = x_BKTD.clone()
        for row, pad in enumerate(self.pads):
            tokens = x_BKTD[row : row + 1, :, pad:]
            short = -tokens.shape[2] % scheme.block
            whole = torch.nn.functional.pad(tokens, (0, 0, 0, short))
            rounded = round_trip(scheme, whole, role)[:, :, : tokens.shape[2]]
            sinks = max(self.keys.sinks, self.values.sinks)
            result[row : row + 1, :, pad:] = torch.cat([tokens[:, :, :sinks], rounded[:, :, sinks:]], 2)
        return result
