"""Weights: the bytes of a model's parameters in their own dtype, or with matrices in a weight quantization format.

Only counted: this package quantizes caches. Embeddings, the output head, norms and biases keep the model's dtype, as weight quantizers
leave them; parameters of linear layers and of experts with two or more dims take the format's bits. Tied weights count once.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any

import torch

GROUP = 128
"""Inputs that share a scale in four-bit weights, as is usual for AWQ and GPTQ."""


class WeightFormat(enum.Enum):
    """The storage format of a model's matrices."""

    NATIVE = "native"
    FP8 = "fp8"
    INT8 = "int8"
    INT4 = "int4"

    def bits(self, dtype: torch.dtype) -> float:
        """Return the bits per matrix entry: int4 with a 16-bit scale and a 4-bit zero point per 128 inputs; fp8 and int8 without scales."""
        if self is WeightFormat.NATIVE:
            return 8 * dtype.itemsize
        return 4 + (16 + 4) / GROUP if self is WeightFormat.INT4 else 8


@dataclass(frozen=True)
class ModelWeights:
    """Parameters of a model: entries of matrices that a quantizer takes, and bytes of all others in the model's dtype."""

    entries: int
    others: int
    dtype: torch.dtype
    buffers: int = 0

    def nbytes(self, stored: WeightFormat) -> int:
        """Return the bytes of all parameters and buffers, with matrices in the format ``stored``."""
        return math.ceil(self.entries * stored.bits(self.dtype) / 8) + self.others + self.buffers


def counted(model: torch.nn.Module) -> ModelWeights:
    """Return a model's weights: parameters of two or more dims count as matrices, except embeddings and the output head."""
    kept = {id(parameter) for module in model.modules() if isinstance(module, torch.nn.Embedding) for parameter in module.parameters()}
    head: Any = getattr(model, "get_output_embeddings", lambda: None)()
    kept |= {id(parameter) for parameter in head.parameters()} if isinstance(head, torch.nn.Module) else set()
    parameters = list(model.parameters())
    matrices = [each for each in parameters if each.dim() >= 2 and id(each) not in kept]
    dtype = matrices[0].dtype if matrices else torch.get_default_dtype()
    chosen = {id(each) for each in matrices}
    others = sum(each.numel() * each.dtype.itemsize for each in parameters if id(each) not in chosen)
    buffers = {id(each): each.numel() * each.dtype.itemsize for each in model.buffers()}
    return ModelWeights(sum(each.numel() for each in matrices), others, dtype, sum(buffers.values()))
