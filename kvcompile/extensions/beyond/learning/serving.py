"""Comparison of training with serving: one batch through the graph used for learning, and through the compiled cache used for serving.

A model may cache tensors other than those it attends to (keys before a normalisation, values before a gate). Tables would then be learned
for numbers that no cache holds, and only this comparison detects it.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import torch

from kvcompile.backend import backend
from kvcompile.errors import ServedOtherwise
from kvcompile.extensions.beyond.learning.loss import parts
from kvcompile.extensions.beyond.learning.parameters import Parameters
from kvcompile.extensions.beyond.learning.quantizer import QuantizerConfig
from kvcompile.extensions.beyond.learning.training_graph import TrainingBackend
from kvcompile.extensions.beyond.scheme import Beyond
from kvcompile.settings import Inner

log = logging.getLogger(__name__)

ROWS, TOKENS = 2, 96
"""The part of a batch that is compared."""
LARGEST = 0.25
"""Largest allowed difference of training from serving, as a share of the change by quantization; rounding alone is below 0.01 in float32.
"""


def compare(model: torch.nn.Module, batch: Any, scheme: Beyond, rule: QuantizerConfig) -> float | None:
    """Return the difference of logits between training and serving with uniform tables, relative to the change by quantization.

    Returns None if model or batch do not allow the comparison: it needs token ids, and a model that takes ``input_ids``,
    ``past_key_values`` and ``use_cache``. Raises ServedOtherwise above ``LARGEST``. Both are compiled to eager operators, and
    ``torch.compiler.reset`` then removes them from Dynamo, which keeps few versions of a model.
    """
    if not _makes_cache(model):
        log.info("training is not compared with serving: %s takes no input_ids, past_key_values and use_cache", type(model).__name__)
        return None
    ids = parts(batch)[0][:ROWS, :TOKENS].to(next(model.parameters()).device)
    trial = Parameters(scheme)
    with torch.no_grad():
        dense = _logits(model, input_ids=ids, use_cache=False)
        trained = _logits(torch.compile(model, backend=TrainingBackend(trial, rule, Inner.EAGER)), input_ids=ids, use_cache=False)
        if not trial.slots:
            return None
        tables = Beyond(scheme.bits, scheme.group, scheme.scale_dtype, trained=True, tables=trial.tables("a trial"))
        serve = torch.compile(model, backend=backend(tables, inner="eager", validate=False))
        served = _logits(serve, input_ids=ids, use_cache=True)
    torch.compiler.reset()
    change, difference = float((served - dense).norm()), float((trained - served).norm())
    share = difference / max(change, 1e-6 * float(dense.norm()))
    if not share <= LARGEST:
        raise ServedOtherwise(
            model=type(model).__name__, expected=LARGEST, found=f"{share:.2f}", sites=len(trial.paths),
            todo="compare kvcompile.explain's sites with these, and report the model",
        )
    return share


def _makes_cache(model: torch.nn.Module) -> bool:
    """Return whether the model's forward has the arguments by which transformers' models make and return a KV cache."""
    return {"input_ids", "past_key_values", "use_cache"} <= inspect.signature(model.forward).parameters.keys()


def _logits(run: Any, **inputs: Any) -> torch.Tensor:
    return run(**inputs).logits.float()
