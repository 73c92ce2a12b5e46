"""Modules: hand-written cached attentions of the test suite as subjects of the acceptance run, each with how it is fed.

They map hidden states to hidden states; what is compared at every step is the output at the last token.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.accept.axes import Case
from benchmarks.accept.oracles import round_trip
from benchmarks.accept.subjects import LONG, ROOM, STEPS, Call, wide
from kvcompile.schemes import Scheme
from kvcompile.types import Role

SUPPORT = Path(__file__).resolve().parents[2] / "tests/support"
GAIN = 3.0
"""What the query and key projections are multiplied by: scores of random hidden states then tell tokens apart."""


@dataclass(frozen=True)
class Recipe:
    """The class of a module, where it is defined, and which arguments say where new tokens lie."""

    module: str
    cls: str
    feed: str


RECIPES = {
    "gpt-fast": Recipe("e2e_layers", "TrilMask", "positions"),
    "index-copy": Recipe("e2e_layers", "IndexCopyAttribute", "positions"),
    "einsum": Recipe("e2e_layers", "GroupedEinsum", "positions"),
    "combined": Recipe("e2e_layers", "CombinedOneWrite", "positions"),
    "per-row": Recipe("e2e_layers", "PerRow", "rows"),
    "slice-assign": Recipe("e2e_layers", "SliceAssign", "offset"),
    "nano-gpt": Recipe("e2e_layers", "Concatenated", "past"),
    "time-first": Recipe("e2e_layers", "ConcatenatedTimeFirst", "past-dict"),
    "block-table": Recipe("paged_models", "BlocksFirst", "table"),
    "slot-mapping": Recipe("paged_models", "Slots", "table"),
}


@dataclass(frozen=True)
class States:
    """Hidden states [B, prompt + steps, width] of one request, and how many tokens are the prompt."""

    x: torch.Tensor
    prompt: int

    @property
    def steps(self) -> int:
        """Return the number of tokens behind the prompt."""
        return self.x.shape[1] - self.prompt


class Module:
    """One hand-written attention with a cache of its own."""

    def __init__(self, case: Case, model: Any, device: torch.device) -> None:
        self.case, self.model, self.device = case, model, device
        self.recipe = RECIPES[case.architecture.name]

    @classmethod
    def build(cls, case: Case, device: torch.device) -> Module:
        """Return the module of a case with weights from a fixed seed."""
        for folder in (str(SUPPORT), str(SUPPORT / "models")):
            if folder not in sys.path:
                sys.path.insert(0, folder)
        recipe = RECIPES[case.architecture.name]
        make = getattr(__import__(recipe.module), recipe.cls)
        torch.manual_seed(0)
        sizes = {} if recipe.feed == "table" else {"capacity": ROOM}
        model = make(batch=len(case.batch.pads), dim=int(case.head_dim), **sizes).eval().requires_grad_(False)
        for projection in (model.q, model.k):
            projection.weight.mul_(GAIN)
        if recipe.feed == "table":
            model.capacity = max(model.capacity, ROOM)
        return cls(case, model.to(device, getattr(torch, case.dtype.value)), device)

    def copied(self, dtype: torch.dtype | None = None) -> Module:
        """Return the same module with buffers of its own, cast to ``dtype``."""
        model = copy.deepcopy(self.model)
        return Module(self.case, model if dtype is None else model.to(dtype), self.device)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights."""
        return self.model.q.weight.dtype

    def request(self, seed: int, prompt: int = LONG, steps: int = STEPS) -> States:
        """Return random hidden states, rounded to the case's dtype."""
        steps = min(steps, self.room - prompt)
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(len(self.case.batch.pads), prompt + steps, self.model.width, generator=generator)
        return States(x.to(self.device, getattr(torch, self.case.dtype.value)), prompt)

    @property
    def room(self) -> int:
        """Return the tokens that its cache holds."""
        return self._table().shape[1] * 8 if self.recipe.feed == "table" else ROOM

    def _table(self) -> torch.Tensor:
        blocks, rows = self.model.blocks, self.model.batch
        order = torch.randperm(blocks, generator=torch.Generator().manual_seed(2), device="cpu")[: rows * ((blocks - 2) // rows)]
        return order.view(rows, -1).to(self.device)

    @torch.no_grad()
    def logits(self, request: States, first: Call, call: Call) -> list[torch.Tensor]:
        """Return the output at the last token of the prompt, which ``first`` runs, and at each step, [B, width]."""
        self._reset()
        start, found = 0, []
        past: Any = {} if self.recipe.feed == "past-dict" else None
        # Modules make positions and masks without a device.
        with torch.device(self.device) if self.device.type != "cpu" else contextlib.nullcontext():
            for stop in range(request.prompt, request.x.shape[1] + 1):
                x, run = request.x[:, start:stop].to(self.dtype), call if start else first
                if self.recipe.feed.startswith("past"):
                    y, past = run(x, past)
                else:
                    y = run(x, *self._places(start, stop))
                found.append(wide(y[:, -1]))
                start = stop
        return found

    def _reset(self) -> None:
        """Empty the module's caches for another request, as its owner would; a compressed one forgets its tokens."""
        for name, buffer in self.model.named_buffers():
            if name.endswith("cache"):
                buffer.zero_()

    def _places(self, start: int, stop: int) -> tuple[Any, ...]:
        pos, rows = torch.arange(start, stop, device=self.device), len(self.case.batch.pads)
        if self.recipe.feed == "offset":
            return (start,)
        if self.recipe.feed == "positions":
            return (pos,)
        # Rows whose prompt is padded by n tokens write n places earlier once it is over.
        behind = torch.tensor(self.case.batch.pads, device=self.device)[:, None] if start else 0
        by_row = pos.repeat(rows, 1) - behind
        return (by_row,) if self.recipe.feed == "rows" else (by_row, self._table())

    @contextlib.contextmanager
    def rounded(self, pair: Callable[[Role], Scheme]) -> Iterator[None]:
        """Make the projections give keys and values as the codes of a scheme that works by token give them back."""
        handles = [
            projection.register_forward_hook(self._rounding(pair(role), role))
            for projection, role in ((self.model.k, Role.KEY), (self.model.v, Role.VALUE))
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _rounding(self, scheme: Scheme, role: Role) -> Callable[..., torch.Tensor]:
        def hook(module: Any, args: Any, x: torch.Tensor) -> torch.Tensor:
            heads = x.unflatten(-1, (self.model.kv, -1)).transpose(1, 2)
            back = round_trip(scheme, heads, role)
            # Prompts begin at place 0, and steps come behind the first tokens.
            exact = scheme.sinks if heads.shape[2] > 1 else 0
            return torch.cat([heads[:, :, :exact], back[:, :, exact:]], 2).transpose(1, 2).flatten(2)

        return hook
