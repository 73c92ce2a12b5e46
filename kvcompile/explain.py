"""Explain: which attentions of a model would be rewritten, how, and why not, without keeping anything compiled."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from kvcompile.backend import backend
from kvcompile.report import Report
from kvcompile.settings import Inner


def explain(model: Any, inputs: Any, scheme: object = "int8") -> Report:
    """Run ``model`` once on ``inputs`` (a mapping, a sequence or one tensor) and report its sites under ``scheme``.

    The inputs are deep-copied, so a cache among them is not touched. Where the result carries a new
    ``past_key_values``, one more token is decoded with it, so that the decode graph is explained too.
    """
    owner = backend(scheme, inner=Inner.EAGER)
    compiled = torch.compile(model, backend=owner)
    given = copy.deepcopy(inputs)
    args, kwargs = (), {}
    if isinstance(given, Mapping):
        kwargs = dict(given)
    elif isinstance(given, Sequence):
        args = tuple(given)
    else:
        args = (given,)
    with torch.no_grad():
        result = compiled(*args, **kwargs)
        past = getattr(result, "past_key_values", None)
        ids = kwargs.get("input_ids", args[0] if args else None)
        if past is not None and isinstance(ids, torch.Tensor) and "past_key_values" not in kwargs:
            compiled(ids[:, -1:], past_key_values=past)
    return owner.report()
