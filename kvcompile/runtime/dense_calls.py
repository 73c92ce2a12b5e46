"""Dense calls: run a graph without its rewrite where one of its cache tensors has to stay dense.

A store reads as zero where nothing was written. A dense tensor that arrives with anything else there (made of ones, by ``torch.empty``, or
still holding an earlier request) would read back as something else, so that all of its places are encoded. A scheme with a window holds
tokens in their order only: there the cache stays dense, and so does one whose memory is not its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvcompile.errors import Unsupported
from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.shapes import source_line
from kvcompile.runtime import handle as handles
from kvcompile.runtime.call import Call
from kvcompile.runtime.forms.form import CacheForm
from kvcompile.runtime.order import Broken

log = logging.getLogger(__name__)

STAYS_DENSE = "_kvcompile_stays_dense"
"""The attribute of a cache tensor that stays dense: the reason."""


def stays_dense(form: CacheForm, call: Call, remembered: bool) -> str:
    """Say why a cache tensor of a call stays dense, "" where it does not; ``remembered``: its places are looked at once."""
    tensor = call.args[form.group.argument] if form.group.argument is not None else None
    if not form.kind.filled or not isinstance(tensor, torch.Tensor):
        return ""
    if handles.is_handle(tensor):
        return "it is a part of another cache, whose memory it would share" if form.kind.in_place and tensor._origin is not None else ""
    if known := getattr(tensor, STAYS_DENSE, ""):
        return str(known)
    if form.kind.in_place and not handles.can_take_over(tensor):
        return (
            "its memory is not its own: it is a view, a parameter, an array or loaded from a file, or something else holds a view of it; a "
            "clone of it can be compressed"
        )
    if form.windowed and (why := form.disordered(call)):
        return why
    if form.windowed and form.holds_more(tensor, form.prior(tensor, call)):
        why = "its places hold values where nothing was written yet, and a window takes tokens in their order: make it of zeros"
        if remembered:
            setattr(tensor, STAYS_DENSE, why)
        return why
    return ""


class DenseCalls:
    """Runs the graph as it was captured, for calls with a cache that stays dense; without a compiler for it such calls raise."""

    def __init__(self, compile_captured: Callable[[], Callable[..., Any]] | None) -> None:
        self.compile_captured = compile_captured
        self.compiled: Callable[..., Any] | None = None

    def results(self, forms: Sequence[CacheForm], call: Call, thawed: Mapping[int, str]) -> tuple[Any, ...] | None:
        """Return the results of a call one of whose caches stays dense, with one warning; None where none does.

        ``thawed``: other arguments that the graph writes. Raises Unsupported without a compiler.
        """
        for form in forms:
            # A call that is refused may come again with a cache that was emptied.
            if why := stays_dense(form, call, remembered=self.compile_captured is not None):
                return self._run(forms, call.args, why, form.group.where, thawed)
        return None

    def out_of_order(self, forms: Sequence[CacheForm], args: tuple[Any, ...], broken: Broken, thawed: Mapping[int, str]) -> tuple[Any, ...]:
        """Return the results of a call that a window cannot serve: its caches become dense, and stay so if no later call can be served."""
        group = broken.group
        results = self._run(forms, args, broken.why, group.where, thawed)
        if broken.lost:
            kept = [args[group.argument]] if group.argument is not None else []
            for tensor in (*kept, *(results[index] for index in group.outputs)):
                setattr(tensor, STAYS_DENSE, broken.why)
        return results

    def _run(self, forms: Sequence[CacheForm], args: tuple[Any, ...], why: str, where: str, thawed: Mapping[int, str]) -> tuple[Any, ...]:
        """Return the results of a call whose caches are dense, or become dense for it; raises Unsupported without a compiler."""
        if self.compile_captured is None:
            raise Unsupported(
                expected="a call that a compressed cache can serve, as strict=True demands", found=why, where=where,
                todo="use a scheme without a window for this layer, or leave strict out",
            )
        if self.compiled is None:
            log.warning("the cache at %s stays dense, and with it the caches of its graph: %s", where, why)
            self.compiled = self.compile_captured()
        written = {form.group.argument: why for form in forms if form.group.argument is not None and form.kind.written}
        compressed = [index for index, arg in enumerate(args) if handles.is_handle(arg)]
        return tuple(self.compiled(*handles.in_full(args, compressed, {**written, **thawed})))


def warn_all_encoded(form: CacheForm, tensor: torch.Tensor) -> None:
    """Warn that all places of a dense cache tensor are encoded, written or not."""
    log.warning(
        "the cache at %s arrives with values in places that were not written yet: all of its %d places are encoded; make it of zeros, and "
        "it costs what is in use", form.group.where, tensor.shape[form.token_dim],
    )


def written_handles(captured: Captured, effects: Effects | None, given: tuple[int, ...]) -> dict[int, str]:
    """Return the indices of the compressed cache tensors among ``given`` that the graph writes, each with the reason to make it dense.

    An attention that stays dense would write into a decoded copy, and the tokens would be lost. ``effects`` is None where a graph could
    not be analysed: it may write all of them.
    """
    if effects is None:
        return dict.fromkeys(given, "it may be written by a graph that could not be analysed (see the report)")
    return {
        entry.index: f"it is written at {source_line(effects.writes[entry.node][0])}, by an attention that could not be rewritten "
        "(see the report)" for entry in captured.inputs if entry.index in given and effects.writes.get(entry.node)
    }
