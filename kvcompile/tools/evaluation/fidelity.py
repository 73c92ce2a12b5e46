"""Fidelity: compares the outputs of every attention module under a scheme with those of the uncompressed model on the same tokens.

Outputs are taken by forward hooks on the modules in the backend's report, so no model family is listed. A layer's error includes that of
the layers before it, as in use. Operations run by their eager bodies here, whatever compiles the other measurements.
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
from kvcompile.tools.evaluation.measures import LayerError
from kvcompile.tools.evaluation.subject import Subject

Outputs = dict[str, list[torch.Tensor]]


def first_tensor(output: Any) -> torch.Tensor | None:
    """Return a module's result if it is a tensor, or the first item of a tuple or list if that is one; else None."""
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    return first if isinstance(first, torch.Tensor) else None


@contextlib.contextmanager
def heard(model: Any, paths: Sequence[str]) -> Iterator[Outputs]:
    """Yield a dict that collects the outputs of the modules at ``paths``, one tensor per call, while the context is open."""
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
    """Return the paths among ``paths`` at which the model has a module, without repeats."""
    known = {name for name, _ in model.named_modules() if name}
    return [path for path in dict.fromkeys(paths) if path in known]


@torch.no_grad()
def dense_outputs(subject: Subject, ids: torch.Tensor, prompt: int, paths: Sequence[str]) -> dict[str, torch.Tensor]:
    """Return the outputs [B, T, ...] of the modules at ``paths`` in the uncompressed model, by path, on the host.

    T counts the tokens that a scheme decodes one by one: from the last one of the ``prompt`` to the last but one of ``ids``.
    """
    with heard(subject.model, paths) as found:
        subject.model(input_ids=ids[:, :-1], use_cache=False, **last_only(subject.model))
    return {path: torch.cat(tensors, 1)[:, prompt - 1 :].cpu() for path, tensors in found.items() if tensors}


def errors(found: dict[str, torch.Tensor], dense: dict[str, torch.Tensor], length: int) -> tuple[LayerError, ...]:
    """Return, for every module, the errors of its outputs ``found`` from ``dense``: mean square error, cosine, signal-to-noise ratio.

    ``length``: the length of the prompts, which the records name.
    """
    rows = []
    for path, theirs in dense.items():
        ours, exact = found[path].double().flatten(0, 1).flatten(1), theirs.double().flatten(0, 1).flatten(1)
        noise, signal = float((ours - exact).square().mean()), float(exact.square().mean())
        cosine = float(torch.nn.functional.cosine_similarity(ours, exact, dim=1).mean())
        rows.append(LayerError(length, path, noise, cosine, decibels(signal, noise)))
    return tuple(rows)


def decibels(signal: float, noise: float) -> float:
    """Return the ratio of ``signal`` to ``noise``, two powers, in decibels; 300 if there is no noise, since JSON has no infinity."""
    return 300.0 if noise == 0 else 10 * math.log10(max(signal, 1e-300) / noise)


def attention_errors(
    subject: Subject, scheme: object, paths: Sequence[str], texts: Mapping[int, torch.Tensor], capacity: int
) -> tuple[LayerError, ...]:
    """Return the errors of the attention modules at ``paths``; ``texts``: ids [B, T] by the length of their prompts.

    Resets the compiler.
    """
    named = modules(subject.model, paths)
    torch.compiler.reset()
    compiled = torch.compile(subject.model, backend=backend(scheme, inner=Inner.EAGER), dynamic=False)
    rows: tuple[LayerError, ...] = ()
    for length, ids in texts.items():
        prompt = len(subject.start) + length
        steps: Outputs = {path: [] for path in named}
        with heard(subject.model, named) as found:
            for _ in forced(compiled, ids, prompt, subject.cache(capacity), {}):
                for path, tensors in found.items():
                    # Keep the last output only: before the first step the list also has the prompt's, which was not read from the cache.
                    steps[path] += [tensor.cpu() for tensor in tensors[-1:]]
                    tensors.clear()
        ours = {path: torch.cat(tensors, 1) for path, tensors in steps.items() if tensors}
        rows += errors(ours, dense_outputs(subject, ids, prompt, list(ours)), length)
    torch.compiler.reset()
    return rows
