"""Dynamo entry: the function that ``backend="kvcompile"`` stands for, and the Backend objects that it has made.

    torch.compile(model, backend="kvcompile", options={"scheme": "int4"})

Dynamo finds ``compile_graph`` through the entry point ``kvcompile`` of the group ``torch_dynamo_backends``, and calls it with each graph
and the options of ``torch.compile``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from kvcompile.backend import Backend, backend
from kvcompile.errors import UnknownSetting
from kvcompile.spelling import did_you_mean

_made: list[tuple[dict[str, Any], Backend]] = []


def compile_graph(
    gm: fx.GraphModule, example_inputs: list[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Return the code of Dynamo's graph ``gm``, compiled by the backend of ``options``, the arguments of ``kvcompile.backend`` by name.

    ``mode``: the argument of torch.compile. Raises UnknownSetting for an option of another name, and the errors of ``kvcompile.backend``;
    Dynamo wraps them in BackendCompilerFailed.
    """
    return _backend_of(dict(options or {}))(gm, example_inputs, mode=mode)


def named_backends() -> tuple[Backend, ...]:
    """Return the backends that ``backend="kvcompile"`` made, in the order of their first graphs; ``torch._dynamo.reset()`` drops them.

    Calls of torch.compile with equal options share a backend, as Dynamo shares their compiled code.
    """
    return tuple(made for _, made in _made)


def _backend_of(options: dict[str, Any]) -> Backend:
    for known, made in _made:
        if known == options:
            return made
    settings = [*inspect.signature(backend).parameters]
    for name in options:
        if name not in settings:
            raise UnknownSetting(known=", ".join(settings), name=name, hint=did_you_mean(str(name), settings))
    made = backend(**options)
    _made.append((options, made))
    return made


# Dynamo calls it when it is reset: compiled code is gone then, and so is what its reports were about.
compile_graph.reset = _made.clear  # type: ignore[attr-defined]
