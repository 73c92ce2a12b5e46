"""Explain: which attentions of a model would be rewritten, how, and why not, without keeping anything compiled."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvcompile.backend import Backend, backend
from kvcompile.passes.rewrite.rewritten import Variant
from kvcompile.report import Report, graph_report
from kvcompile.schemes import Certify
from kvcompile.settings import Inner
from kvcompile.variants import kernel_text


def observe(model: Any, inputs: Any, owner: Callable[..., Any]) -> Any:
    """Run ``model`` once on ``inputs`` under ``owner``, and one more token where a cache comes back; returns the last call's result.

    The inputs are deep-copied, so a cache among them is not touched.
    """
    compiled = torch.compile(model, backend=owner)
    args, kwargs = arguments(copy.deepcopy(inputs))
    with torch.no_grad():
        result = compiled(*args, **kwargs)
        past = getattr(result, "past_key_values", None)
        ids = kwargs.get("input_ids", args[0] if args else None)
        if past is not None and isinstance(ids, torch.Tensor) and ids.shape[-1] > 1:
            # Tensors that go with the first tokens, such as their mask, would not fit one more.
            step = {name: value for name, value in kwargs.items() if not isinstance(value, torch.Tensor)} | {"past_key_values": past}
            result = compiled(input_ids=ids[:, -1:], **step) if "input_ids" in kwargs else compiled(ids[:, -1:], **step)
    return result


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A mapping, a sequence or one tensor as positional and keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Sequence):
        return tuple(inputs), {}
    return (inputs,), {}


def explain(
    model: Any, inputs: Any, scheme: object = "int8", *, tokens: int | None = None, certify: Certify | None = None
) -> Report:
    """Run ``model`` once on ``inputs`` (a mapping, a sequence or one tensor) and report its sites under ``scheme``.

    The inputs are deep-copied, so a cache among them is not touched. Where the result carries a
    ``past_key_values``, one more token is decoded with it, so that the decode graph is explained too.
    Bytes are given for ``tokens`` tokens, else for the length that was captured. ``certify`` as ``backend`` takes it.
    """
    owner = backend(scheme, inner=Inner.EAGER, certify=certify)
    observe(model, inputs, owner)
    return described(owner, tokens)


def described(owner: Backend, tokens: int | None = None) -> Report:
    """Report what ``owner`` compiled, without the caches that live: bytes for ``tokens``, kernels as Inductor would make them."""
    graphs = []
    for record in owner.records:
        graph, plan, variants = record.report, record.planned, record.variants
        if plan is None:
            graphs.append(graph)
            continue
        made = graph_report(graph.index, plan, graph.uncached, tokens)
        compiled = [] if variants is None else [variant for variant in Variant if variant in variants]
        kernels = tuple(kernel_text(variants.rewritten(variant), len(plan.sites)) for variant in compiled if variants is not None)
        graphs.append(dataclasses.replace(graph, sites=made.sites, kernels=kernels))
    return Report(graphs=graphs, tokens=tokens, unmatched=owner.report().unmatched)
