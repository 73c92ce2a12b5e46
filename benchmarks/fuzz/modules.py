"""Modules: the ``nn.Module`` of a choice, made of its text, and the tensors that it keeps."""

from __future__ import annotations

import itertools
import linecache
from typing import Any

import torch
from torch import nn

from benchmarks.fuzz.expressions import BATCH, BLOCK, CAPACITY, DIM, ENCODED, HEADS, LONG, RING
from benchmarks.fuzz.features import Choice
from benchmarks.fuzz.schemes import LEVEL_COUNTS, SCHEMES, Magnitudes
from benchmarks.fuzz.writing import Text, heads_of, written
from kvcompile.schemes.gauss import ABOVE_ZERO

Tensor = torch.Tensor
_NUMBERS = itertools.count()


def room_of(choice: Choice) -> int:
    """How many tokens a choice's caches hold."""
    return RING if choice["layout"] == "ring" else LONG if choice["chunks"].startswith("301") else CAPACITY


def shapes_of(choice: Choice) -> dict[str, tuple[int, ...]]:
    """The caches that a choice keeps, by name."""
    layout, kv, room = choice["layout"], heads_of(choice), room_of(choice)
    shape = (BATCH, kv, room, DIM)
    named: dict[str, dict[str, tuple[int, ...]]] = {
        "concatenated": {}, "one-tensor": {"cache": (2, *shape)}, "layers": {"cache": (3, 2, *shape)},
        "halves": {"cache": (*shape[:3], 2 * DIM)}, "keys-are-values": {"cache": shape},
        "tokens-first": dict.fromkeys(("k_cache", "v_cache"), (BATCH, room, kv, DIM)),
        "keys-transposed": {"k_cache": (BATCH, kv, DIM, room), "v_cache": shape},
        "largest-batch": dict.fromkeys(("k_cache", "v_cache"), (BATCH + 1, kv, room, DIM)),
        "cross": dict.fromkeys(("k_cache", "v_cache"), (BATCH, kv, ENCODED, DIM)),
        "paged": dict.fromkeys(("k_cache", "v_cache"), (BATCH * room // BLOCK + 1, BLOCK, kv, DIM)),
    }
    return named.get(layout, dict.fromkeys(("k_cache", "v_cache"), shape))


def drawn_tokens(shape: tuple[int, ...], choice: Choice) -> Tensor:
    """Return new keys or values [B, K, n, D] that the choice's scheme stores almost without loss."""
    magnitudes = SCHEMES[choice["scheme"]].magnitudes
    made = torch.randn(shape)
    if magnitudes is Magnitudes.FREE:
        return made
    made = torch.where(made < 0, -1.0, 1.0)
    if magnitudes is Magnitudes.LEVELS:
        made *= _levels(shape)
    return made if magnitudes is Magnitudes.ONE else made * 2.0 ** torch.randint(-1, 2, (*shape[:3], 1))


def _levels(shape: tuple[int, ...]) -> Tensor:
    """Return magnitudes of gauss's levels, in a random order in each 16 channels of the last dim."""
    order = torch.rand((*shape[:-1], shape[-1] // DIM, DIM)).argsort(-1)
    return torch.tensor(ABOVE_ZERO[4]).repeat_interleave(torch.tensor(LEVEL_COUNTS))[order].view(shape)


def unwritten(shape: tuple[int, ...], choice: Choice) -> Tensor:
    """Return a cache that nobody wrote to yet."""
    kind = choice["unwritten"]
    if kind != "zeros" and SCHEMES[choice["scheme"]].magnitudes is Magnitudes.LEVELS:
        across = shape[-2] == DIM and choice["layout"] == "keys-transposed"
        held = _levels((*shape[:-2], shape[-1], DIM)).mT if across else _levels(shape)
        return held * {"noise": torch.where(torch.randn(shape) < 0, -1.0, 1.0), "ones": 1.0, "nines": 8.0}[kind]
    if kind == "noise":
        return torch.randn(shape) if choice["scheme"] == "dense" else torch.where(torch.randn(shape) < 0, -1.0, 1.0)
    return torch.full(shape, {"zeros": 0.0, "ones": 1.0, "nines": 9.0}[kind])


class Fuzzed(nn.Module):
    """A cached attention; its ``forward`` is a choice's text."""

    now = 0
    """The tokens so far, where a choice counts them by a Python int."""

    def __init__(self, choice: Choice, dtype: torch.dtype, device: str) -> None:
        super().__init__()
        self.room = room_of(choice)
        buffers: dict[str, Tensor] = {"at": torch.zeros((), dtype=torch.int64)}
        if choice["caches"] == "buffers":
            buffers |= {name: unwritten(shape, choice).to(dtype) for name, shape in shapes_of(choice).items()}
        if "buffer-" in choice["mask"]:
            buffers["causal"] = torch.ones(self.room, self.room, dtype=torch.bool).tril()
        if choice["memory"] == "two":
            buffers |= {name: torch.randn(1, heads_of(choice), 2, DIM).to(dtype) for name in ("k_memory", "v_memory")}
        if choice["layout"] == "concatenated":
            # New tokens are computed: a graph that hands its inputs back has no cache of its own.
            buffers["identity"] = torch.eye(DIM).to(dtype)
        if choice["softmax"] == "sinks":
            buffers["sinks"] = torch.randn(HEADS, 1, 1).to(dtype)
        for name, value in buffers.items():
            self.register_buffer(name, value.to(device))
        if choice["beside"] == "alias":
            self.register_buffer("alias", next(getattr(self, name) for name in ("k_cache", "cache") if name in buffers).view(-1))


def module_of(choice: Choice, device: str = "cpu") -> tuple[Fuzzed, Text, str]:
    """Return a choice's module, its text, and the name under which Python knows the text; forget it with ``forgotten``."""
    text = written(choice, device)
    name = f"<fuzz {next(_NUMBERS)}>"
    linecache.cache[name] = (len(text.source), None, text.source.splitlines(keepends=True), name)
    scope: dict[str, Any] = {"torch": torch, "__name__": __name__}
    exec(compile(text.source, name, "exec"), scope)  # noqa: S102
    kind = type("Fuzzed", (Fuzzed,), {key: scope[key] for key in ("forward", "sighted", "visible")} | {"__module__": __name__})
    return kind(choice, getattr(torch, choice["dtype"]), device).eval(), text, name


def forgotten(name: str) -> None:
    """Forget a text."""
    linecache.cache.pop(name, None)
