"""Dense calls: run a graph without its rewrite if one of its cache tensors must stay dense.

A store reads as zero where nothing was written. A dense tensor that arrives with other values there (made of ones, by ``torch.empty``, or
still holding an earlier request) would read back differently, so all of its slots are encoded. A scheme with a window holds tokens in
order only: there the cache stays dense, and so does a cache that does not own its memory.

A call that its compressed caches refuse (``CallRefused``) runs on their decoded values. The caches then stay dense until they are
emptied: codes are written once, and encoding decoded values again would round them again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.errors import CallRefused, TokensOutOfOrder, Unsupported
from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.graph.effects import Effects
from kvcompile.passes.graph.shapes import source_line
from kvcompile.runtime.call.token_order import OutOfOrder
from kvcompile.runtime.forms.call_arguments import Call
from kvcompile.runtime.forms.form import CacheForm
from kvcompile.runtime.forms.slot_groups import Group
from kvcompile.runtime.handle import tensor as handles
from kvcompile.runtime.store.written_once import forget

log = logging.getLogger(__name__)

STAYS_DENSE = "_kvcompile_stays_dense"
"""Attribute of a cache tensor that stays dense: the fields of its ``Mark``, as plain values, since tensors are saved with attributes."""


@dataclass(frozen=True)
class Mark:
    """The mark of a cache tensor that stays dense: the reason, and the name of the error that refused the call ("" if there was none).

    ``emptied``: whether the mark ends once the tensor is emptied, which is checked if its ``version`` differs from the last call's.
    """

    why: str
    kind: str = ""
    emptied: bool = False
    version: int | None = None

    @staticmethod
    def of(tensor: torch.Tensor) -> Mark | None:
        """Return the mark of a cache tensor, or of the tensor that it is a view of (a crop); None without a mark."""
        found = getattr(tensor, STAYS_DENSE, None) or getattr(tensor._base, STAYS_DENSE, None)
        return None if found is None else Mark(*found)

    def put(self, tensor: torch.Tensor) -> None:
        """Attach this mark, with the tensor's present version, to a cache tensor, and forget the codes from before it became dense."""
        forget(tensor)
        setattr(tensor, STAYS_DENSE, (self.why, self.kind, self.emptied, _version(tensor)))

    def holds(self, form: CacheForm, tensor: torch.Tensor, call: Call) -> bool:
        """Return whether the marked tensor still stays dense. Waits for the device only if other code wrote to it since the last call."""
        if not self.emptied or not form.kind.filled or (self.version is not None and self.version == _version(tensor)):
            return True
        try:
            return form.prior(tensor, call) > 0 or bool(tensor.any())
        except CallRefused:
            return True


def _version(tensor: torch.Tensor) -> int | None:
    """Return a tensor's version, which counts writes; None if it counts none."""
    return None if tensor.is_inference() else tensor._version


def stays_dense(form: CacheForm, call: Call, remembered: bool) -> Mark | None:
    """Return the reason why a cache tensor of a call stays dense; None if it does not.

    ``remembered``: a tensor that a window cannot take is marked, so that its values are checked only once.
    """
    tensor = call.args[form.group.argument] if form.group.argument is not None else None
    if not isinstance(tensor, torch.Tensor):
        return None
    if handles.is_handle(tensor):
        shares = form.kind.filled and form.kind.in_place and tensor._origin is not None
        return Mark("it is a part of another cache, whose memory it would share") if shares else None
    if (mark := Mark.of(tensor)) is not None and form.kind.written:
        if mark.holds(form, tensor, call):
            return mark
        tensor.__dict__.pop(STAYS_DENSE, None)
    if not form.kind.filled and not form.kind.adopted:
        return None
    if form.kind.adopted and not handles.can_take_over(tensor):
        return Mark(
            "it does not own its memory alone: it is a view, a parameter, an array or loaded from a file, or something else holds a view "
            "of it; a clone of it can be compressed"
        )
    if form.windowed and (why := form.disordered(call)):
        return Mark(why)
    if form.windowed and form.holds_more(tensor, form.prior(tensor, call)):
        mark = Mark("its unwritten slots hold nonzero values, and a window needs tokens in order: create it with zeros")
        if remembered:
            mark.put(tensor)
        return mark
    return None


class DenseCalls:
    """Runs the captured graph, unrewritten, for calls with a cache that stays dense; without a compiler for it such calls raise.

    ``reported``: the reasons already logged, by kind and source line, shared by the graphs of a backend.
    """

    def __init__(self, compile_captured: Callable[[], Callable[..., Any]] | None, reported: dict[object, str]) -> None:
        self.compile_captured, self.reported = compile_captured, reported
        self.compiled: Callable[..., Any] | None = None

    def results(self, forms: Sequence[CacheForm], call: Call, densified: Mapping[int, str]) -> tuple[Any, ...] | None:
        """Return the results of a call with a cache that stays dense, with one warning; None if no cache does.

        ``densified``: other arguments that the graph writes. Raises Unsupported without a compiler.
        """
        for form in forms:
            # A refused call may come again with an emptied cache.
            if mark := stays_dense(form, call, remembered=self.compile_captured is not None):
                results = self._run(forms, call.args, mark.why, form.group.where, densified, mark.kind)
                self._mark_again(forms, call.args, results)
                return results
        return None

    def out_of_order(
        self, forms: Sequence[CacheForm], args: tuple[Any, ...], found: OutOfOrder, densified: Mapping[int, str]
    ) -> tuple[Any, ...]:
        """Return the results of a call whose tokens a window cannot take in their order, computed by the unrewritten graph on dense caches.

        ``found``: the refusal, with its reason. ``densified``: why other arguments that the graph writes become dense, by their index. If
        ``found.lost``, the caches are marked to stay dense. Raises Unsupported without a compiler.
        """
        group = found.group
        results = self._run(forms, args, found.why, group.where, densified)
        if found.lost:
            for tensor in _tensors(group, args, results):
                Mark(found.why).put(tensor)
        return results

    def refused(
        self, forms: Sequence[CacheForm], args: tuple[Any, ...], refused: CallRefused, densified: Mapping[int, str]
    ) -> tuple[Any, ...]:
        """Return the results of a call that its compressed caches refuse, computed after they become dense.

        They stay dense until they are emptied. Raises ``refused`` without a compiler, or if the model itself fails on this call too;
        TokensOutOfOrder for a cache that has no dense values.
        """
        if self.compile_captured is None:
            raise refused
        mark = Mark(str(refused), type(refused).__name__, emptied=True)
        try:
            results = self._run(forms, args, mark.why, str(refused.facts.get("where", forms[0].group.where)), densified, mark.kind)
        except TokensOutOfOrder:
            # An earlier call broke a row and the host did not look: that error is raised, not this call's refusal.
            raise
        except Exception as error:
            raise refused from error
        for form in forms:
            for tensor in _tensors(form.group, args, results) if form.kind.written else ():
                mark.put(tensor)
        return results

    @staticmethod
    def _mark_again(forms: Sequence[CacheForm], args: tuple[Any, ...], results: tuple[Any, ...]) -> None:
        """Copy the mark of each cache argument of a call to the tensors of that cache that the call returns."""
        for form in forms:
            given = args[form.group.argument] if form.group.argument is not None else None
            if isinstance(given, torch.Tensor) and (mark := Mark.of(given)) is not None and form.kind.written:
                for tensor in _tensors(form.group, args, results):
                    mark.put(tensor)

    def _run(
        self, forms: Sequence[CacheForm], args: tuple[Any, ...], why: str, where: str, densified: Mapping[int, str], kind: str = ""
    ) -> tuple[Any, ...]:
        """Return the results of a call on dense caches, made dense if needed.

        ``why`` is logged once for each ``kind`` of reason and source line. Raises Unsupported without a compiler, TokensOutOfOrder for a
        cache that has no dense values.
        """
        if self.compile_captured is None:
            raise Unsupported(
                expected="a call that a compressed cache can serve, as strict=True demands", found=why, where=where,
                todo="use a scheme without a window for this layer, or leave strict out",
            )
        if self.compiled is None:
            self.compiled = self.compile_captured()
        # Reasons "": the warning below covers these tensors.
        written = {form.group.argument: "" for form in forms if form.group.argument is not None and form.kind.written}
        compressed = [index for index, arg in enumerate(args) if handles.is_handle(arg)]
        dense = handles.densify(args, compressed, {**written, **densified})
        if (kind, where) not in self.reported:
            self.reported[kind, where] = why
            log.warning("the cache at %s stays dense, and so do the other caches of its graph: %s", where, why)
        return tuple(self.compiled(*dense))


def _tensors(group: Group, args: tuple[Any, ...], results: tuple[Any, ...]) -> list[torch.Tensor]:
    """Return the tensors of a cache after a call: its argument and its results."""
    given = [args[group.argument]] if group.argument is not None else []
    return [tensor for tensor in (*given, *(results[index] for index in group.outputs)) if isinstance(tensor, torch.Tensor)]


def warn_all_encoded(form: CacheForm, tensor: torch.Tensor) -> None:
    """Warn that all slots of a dense cache tensor are encoded, written or not."""
    log.warning(
        "the cache at %s holds nonzero values in slots that were not written yet, so all of its %d slots are encoded; create it with "
        "zeros, so that only used slots take memory", form.group.where, tensor.shape[form.token_dim],
    )


def written_handles(captured: Captured, effects: Effects | None, given: tuple[int, ...]) -> dict[int, str]:
    """Return the indices of the compressed cache tensors among ``given`` that the graph writes, each with the reason to make it dense.

    An attention that stays dense would write into a decoded copy, and the tokens would be lost. ``effects``: None if the graph could not be
    analysed, so that it may write all of them.
    """
    if effects is None:
        return dict.fromkeys(given, "it may be written by a graph that could not be analysed (see the report)")
    return {
        entry.index: f"it is written at {source_line(effects.writes[entry.node][0])}, by an attention that could not be rewritten "
        "(see the report)" for entry in captured.inputs if entry.index in given and effects.writes.get(entry.node)
    }
