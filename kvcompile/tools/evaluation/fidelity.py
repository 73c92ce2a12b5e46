"""Fidelity: outputs of every attention module under a scheme, beside those of the uncompressed model on the same tokens.

Outputs are taken by forward hooks on the modules that the backend's report names, so there is no list of model families. A layer's error
holds that of the layers before it, as in use. The operations run by their eager bodies here, whatever compiles the other measurements.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from kvcompile.backend import backend
from kvcompile.settings import Inner
from kvcompile.tools.evaluation.decoding import forced, last_only
from kvcompile.tools.evaluation.measures import Layer
from kvcompile.tools.evaluation.subject import Subject

Outputs = dict[str, list[torch.Tensor]]


def first_tensor(output: Any) -> torch.Tensor | None:
    """The module's result: a tensor, or the first of a tuple."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    return first if isinstance(first, torch.Tensor) else None


@contextlib.contextmanager
def heard(model: Any, paths: Sequence[str]) -> Iterator[Outputs]:
    """Outputs of the modules at ``paths``, a tensor a call, while the context is open."""
    found: Outputs = {path: [] for path in paths}

    def listen(path: str) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            tensor = first_tensor(output)
            if tensor is not None:
                found[path].append(tensor.detach())

        return hook

    handles = [model.get_submodule(path).register_forward_hook(listen(path)) for path in paths]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def modules(model: Any, paths: Sequence[str]) -> list[str]:
    """The paths that name a module of the model, each once."""
    known = {name for name, _ in model.named_modules() if name}
    return [path for path in dict.fromkeys(paths) if path in known]


@torch.no_grad()
def dense_outputs(subject: Subject, ids: torch.Tensor, prompt: int, paths: Sequence[str]) -> dict[str, torch.Tensor]:
    """Outputs [B, T, ...] of the uncompressed model, of the tokens that a scheme decodes singly."""
    with heard(subject.model, paths) as found:
        subject.model(input_ids=ids[:, :-1], use_cache=False, **last_only(subject.model))
    return {path: torch.cat(tensors, 1)[:, prompt - 1 :].cpu() for path, tensors in found.items() if tensors}


def errors(found: dict[str, torch.Tensor], dense: dict[str, torch.Tensor], length: int) -> tuple[Layer, ...]:
    """Mean square, cosine and signal to noise of every module's outputs."""
    rows = []
    for path, theirs in dense.items():
        ours, exact = found[path].double().flatten(0, 1).flatten(1), theirs.double().flatten(0, 1).flatten(1)
        noise, signal = float((ours - exact).square().mean()), float(exact.square().mean())
        cosine = float(torch.nn.functional.cosine_similarity(ours, exact, dim=1).mean())
        rows.append(Layer(length, path, noise, cosine, decibels(signal, noise)))
    return tuple(rows)


def decibels(signal: float, noise: float) -> float:
    """Signal to noise; 300 where there is no noise, which JSON can hold as it cannot hold infinity."""
    return 300.0 if noise == 0 else 10 * math.log10(max(signal, 1e-300) / noise)


def attention_errors(
    subject: Subject, scheme: object, paths: Sequence[str], texts: Mapping[int, torch.Tensor], capacity: int
) -> tuple[Layer, ...]:
    """Errors of the attention modules at ``paths``; ``texts``: ids [B, T] by the length of their prompts."""
    named = modules(subject.model, paths)
    torch.compiler.reset()
    compiled = torch.compile(subject.model, backend=backend(scheme, inner=Inner.EAGER), dynamic=False)
    rows: tuple[Layer, ...] = ()
    for length, ids in texts.items():
        prompt = len(subject.start) + length
        steps: Outputs = {path: [] for path in named}
        with heard(subject.model, named) as found:
            for _ in forced(compiled, ids, prompt, subject.cache(capacity), {}):
                for path, tensors in found.items():
                    # The first step comes behind the prompt's own call, whose outputs were not read from the cache.
                    steps[path] += [tensor.cpu() for tensor in tensors[-1:]]
                    tensors.clear()
        ours = {path: torch.cat(tensors, 1) for path, tensors in steps.items() if tensors}
        rows += errors(ours, dense_outputs(subject, ids, prompt, list(ours)), length)
    torch.compiler.reset()
    return rows
