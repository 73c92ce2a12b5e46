"""The memo of traced calls: a capture with it is the capture without it, node by node, and memory shared alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx
from versions import OLD_TRANSFORMERS

from kvcompile.passes.capture import capture as capturing
from kvcompile.passes.capture.trace_cache import TraceCache

transformers = pytest.importorskip("transformers")

CASES = [
    ("llama", "static"), ("llama", "dynamic"), ("gpt_oss", "static"), ("deepseek_v3", "dynamic"), ("lfm2", "static"),
    pytest.param("bloom", "static", marks=pytest.mark.skipif(OLD_TRANSFORMERS, reason="its ALiBi does not fit a static cache")),
]
"""Beside these gemma2, gptj, falcon, phi and mixtral were compared when the memo was written."""


def _graphs(name: str, kind: str, gradients: bool = True) -> list[tuple[fx.GraphModule, list[Any]]]:
    """Dynamo's graphs of a prompt and two steps of a tiny model, with their arguments."""
    from kvcompile.tools.cli.architectures import build

    subject = build(name, "eager" if name in {"gpt_oss", "bloom"} else "sdpa", layers=3)
    subject.model.requires_grad_(gradients)
    found: list[tuple[fx.GraphModule, list[Any]]] = []

    def keep(gm: fx.GraphModule, examples: list[Any]) -> Any:
        found.append(_both(gm, examples))
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(subject.model, backend=keep)
    cache = subject.static_cache(32) if kind == "static" else subject.dynamic_cache()
    ids = torch.randint(0, 64, (2, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for first, last in ((0, 7), (7, 8), (8, 9)):
            compiled(ids[:, first:last], past_key_values=cache, use_cache=True)
    torch._dynamo.reset()
    return found


def _both(gm: fx.GraphModule, examples: list[Any]) -> Any:
    made = capturing.capture(gm, examples), None
    hits = _LAST.hits
    call = TraceCache.call
    TraceCache.call = lambda self, kind, target, args, kwargs, run: run()  # type: ignore[method-assign]
    try:
        return made[0], capturing.capture(gm, examples), hits
    finally:
        TraceCache.call = call  # type: ignore[method-assign]


_LAST: Any = None


@pytest.fixture(autouse=True)
def last(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the memo that a capture made."""

    class Kept(TraceCache):
        def __init__(self, mode: Any) -> None:
            global _LAST  # noqa: PLW0603
            super().__init__(mode)
            _LAST = self

    monkeypatch.setattr(capturing, "TraceCache", Kept)


def _text(module: fx.GraphModule) -> list[str]:
    lines = []
    for node in module.graph.nodes:
        value = node.meta.get("val")
        values = value if isinstance(value, (list, tuple)) else [value]
        sizes = [
            (
                tuple(map(str, item.shape)), tuple(map(str, item.stride())), str(item.storage_offset()), item.dtype, item.device,
                item.requires_grad,
            )
            if isinstance(item, torch.Tensor) else str(item) for item in values
        ]
        trace = (node.meta.get("stack_trace") or "").rstrip().splitlines()[-1:]
        lines.append(f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} {sizes} {trace}")
    return lines


def _shared(module: fx.GraphModule) -> list[tuple[str, str]]:
    """The pairs of a node and an operand of one or two calls back whose fake values share memory."""
    found = []
    for node in module.graph.nodes:
        near = {item for operand in node.all_input_nodes for item in (operand, *operand.all_input_nodes)}
        for item in sorted(near, key=str):
            a, b = node.meta.get("val"), item.meta.get("val")
            if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch._C._is_alias_of(a, b):
                found.append((node.name, item.name))
    return found


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_capture_with_the_memo_is_the_capture_without(name: str, kind: str) -> None:
    graphs = _graphs(name, kind)
    assert graphs
    hits = 0
    for ours, plain, count in graphs:
        assert _text(ours.module) == _text(plain.module)
        assert _shared(ours.module) == _shared(plain.module)
        hits += count
    assert hits > 20


def test_parameters_that_could_have_gradients_are_remembered_too() -> None:
    # from_pretrained leaves requires_grad on: the projections of 32 layers were traced one by one.
    assert [count for *_, count in _graphs("llama", "static", True)] == [count for *_, count in _graphs("llama", "static", False)]
