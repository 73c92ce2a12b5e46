"""Explain: report which attentions of a model would be rewritten, how, and why not. Nothing stays compiled."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kvcompile.backend import Backend, backend
from kvcompile.details import RecordSource
from kvcompile.passes.rewrite.rewritten import Variant
from kvcompile.report import Report, graph_report
from kvcompile.schemes import Certify
from kvcompile.settings import Inner
from kvcompile.variants import kernel_text, slow_schemes


def observe(model: Any, inputs: Any, owner: Callable[..., Any]) -> Any:
    """Run ``model`` on a deep copy of ``inputs`` under the backend ``owner`` and return the result.

    If the result has ``past_key_values``, one more token is run with it, and the result of that call is returned.
    """
    compiled = torch.compile(model, backend=owner)
    args, kwargs = arguments(copy.deepcopy(inputs))
    with torch.no_grad():
        result = compiled(*args, **kwargs)
        past = getattr(result, "past_key_values", None)
        if past is not None and (step := _step(args, kwargs)) is not None:
            result = compiled(*step[0], **step[1], past_key_values=past)
    return result


def _step(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the arguments of a step of one token after a prompt, without the cache; None if there are no token ids or only one.

    Tensors that belong to the prompt, such as its mask, are dropped. Arguments of an encoder and its outputs are kept.
    """
    name = "decoder_input_ids" if "decoder_input_ids" in kwargs else "input_ids"
    ids = kwargs.get(name, args[0] if args else None)
    if not isinstance(ids, torch.Tensor) or ids.shape[-1] < 2:
        return None
    encoder = (lambda item: item.startswith("encoder_")) if name == "input_ids" else (lambda item: not item.startswith("decoder_"))
    given = {item: value for item, value in kwargs.items() if item not in {name, "past_key_values"}}
    kept = {item: value for item, value in given.items() if not isinstance(value, torch.Tensor) or encoder(item)}
    last = ids[:, -1:]
    return ((), {**kept, name: last}) if name in kwargs else ((last,), kept)


def arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return ``inputs`` (a mapping, a sequence or one tensor) as positional and keyword arguments."""
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    if isinstance(inputs, Sequence):
        return tuple(inputs), {}
    return (inputs,), {}


def explain(
    model: Any, inputs: Any, scheme: object = "int8", *, tokens: int | None = None, certify: Certify | None = None
) -> Report:
    """Run ``model`` once on ``inputs`` (a mapping, a sequence or one tensor) and return the report of its sites under ``scheme``.

    The inputs are deep-copied, so a cache among them is not touched. If the result has ``past_key_values``, one more token is decoded with
    it, so that the decode graph is reported too. Raises a SchemeError for a text or a policy that names no scheme; errors of the model pass
    through.
    ``tokens``: the cache length to report bytes for; None for the captured length.
    ``certify``: as for ``backend``.
    """
    owner = backend(scheme, inner=Inner.EAGER, certify=certify)
    observe(model, inputs, owner)
    return described(owner, tokens)


def described(owner: Backend, tokens: int | None = None) -> Report:
    """Return a Report of the graphs that ``owner`` compiled, without live caches: bytes at ``tokens`` tokens, kernels as for Inductor."""
    graphs = []
    for record in owner.records:
        graph, plan, variants = record.report, record.planned, record.variants
        if plan is None:
            graphs.append(graph)
            continue
        made = graph_report(graph.index, plan, graph.uncached, tokens)
        compiled = [] if variants is None else [variant for variant in Variant if variant in variants]
        rewritten = [variants.rewritten(variant) for variant in compiled if variants is not None]
        kernels = tuple(kernel_text(each, len(plan.sites)) for each in rewritten)
        slow = tuple(dict.fromkeys(line for each in rewritten for line in slow_schemes(each)))
        graphs.append(dataclasses.replace(graph, sites=made.sites, kernels=kernels, slow=slow))
    source = RecordSource(owner.records)
    return Report(graphs=graphs, tokens=tokens, unmatched=owner.report().unmatched, source=lambda: source)
