"""Script: the calls of a module and the events between them, run once for the plain module and once for each compiled one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

import kvcompile
from benchmarks.fuzz.events import EVENTS
from benchmarks.fuzz.expressions import BATCH, BLOCK, DIM, ENCODED, HEADS
from benchmarks.fuzz.features import Choice
from benchmarks.fuzz.modules import Fuzzed, drawn_tokens, room_of, shapes_of, unwritten
from benchmarks.fuzz.writing import ROWS, Text, heads_of

Tensor = torch.Tensor
FIRST, SECOND = 2, 4
"""How many calls come before the first and before the second event."""


class Run:
    """One module on its way through a script; ``results`` and ``states`` are what is compared, ``sight`` which queries see a key."""

    def __init__(self, module: Fuzzed, text: Text, choice: Choice, compiled: Callable[[Fuzzed], Callable[..., Any]], device: str) -> None:
        self.module, self.text, self.choice, self.compiled, self.device = module, text, choice, compiled, device
        self.call, self.dtype, self.room = compiled(module), getattr(torch, choice["dtype"]), room_of(choice)
        self.start, self.behind, self.past = 0, [0] * BATCH, False
        self.results: list[Tensor] = []
        self.states: list[Tensor] = []
        self.sight: list[Tensor] = []
        self.more: list[Tensor] = []
        self.places: list[Tensor] = []
        self.snapshot: tuple[Any, int] = ({}, 0)
        self.caches: dict[str, Tensor | None] = {"kc": None, "vc": None}
        if choice["caches"] == "arguments" and choice["layout"] != "concatenated":
            made = [unwritten(shape, choice).to(self.dtype).to(device) for shape in shapes_of(choice).values()]
            self.caches = dict(zip(("kc", "vc"), [*made, None], strict=False))
        # Blocks of a pool in reverse order, the pool's last one unused.
        blocks = room_of(choice) // BLOCK
        self.table = torch.arange(BATCH * blocks).flip(0).view(BATCH, -1).to(device)

    # What events use.

    def tensors(self) -> list[Tensor]:
        """The cache tensors."""
        if self.choice["caches"] == "arguments":
            return [cache for cache in self.caches.values() if cache is not None]
        return [getattr(self.module, name) for name in shapes_of(self.choice)]

    def batch_first(self) -> list[Tensor]:
        """The caches as views whose first dim are the batch's rows."""
        layout = self.choice["layout"]
        if layout in {"one-tensor", "layers"}:
            whole = self.tensors()[0] if layout == "one-tensor" else self.tensors()[0][1]
            return [whole[0], whole[1]]
        return self.tensors()

    def held(self) -> list[Tensor]:
        """The caches as [B, K, T, D] views; what a table names of a pool."""
        found, layout = self.batch_first(), self.choice["layout"]
        if layout == "tokens-first":
            return [cache.transpose(1, 2) for cache in found]
        if layout == "keys-transposed":
            return [found[0].transpose(2, 3), found[1]]
        if layout == "paged":
            return [cache[self.table].flatten(1, 2).transpose(1, 2) for cache in found]
        return found

    def move(self, start: int) -> None:
        """Go on at another position, and tell the module's counter and a concatenated past."""
        self.module.at.add_(start - self.start) if start else self.module.at.zero_()
        self.module.now = start
        if self.choice["layout"] == "concatenated":
            self.caches = {name: None if cache is None or not start else cache[:, :, :start] for name, cache in self.caches.items()}
        self.start, self.behind = start, [min(item, start) for item in self.behind]

    def forget(self) -> None:
        """Begin a second request with the first one's prompt length."""
        self.move(0)
        self.past = False
        self.step(int(self.choice["chunks"].split(",")[0]))

    def replace(self, module: Fuzzed) -> None:
        """Go on with another module."""
        self.module, self.call = module, self.compiled(module)

    # Calls.

    def positions(self, count: int) -> Tensor:
        """Positions [n], or [B, n] where rows have their own."""
        kind = self.choice["places"]
        pos = torch.arange(self.start, self.start + count)
        if kind in ROWS:
            return torch.stack([pos - behind for behind in self.behind]).clamp(min=0) if self.past else pos.expand(BATCH, -1).clone()
        if kind == "reversed":
            return pos.flip(0)
        if kind == "shuffled":
            return pos[torch.randperm(count)]
        if kind == "twice" and count > 1:
            pos[-1] = pos[-2]
        return pos

    def _mask(self, arguments: dict[str, Any], q: Tensor) -> Tensor:
        given = self.choice["given"]
        if given in {"padding", "int-segments", "int-odd"}:
            places = torch.arange(self.room)
            if given == "padding":
                made = places >= torch.arange(BATCH)[:, None]
            elif given == "int-segments":
                made = (places + torch.arange(BATCH)[:, None]) // 3 % 2 + 1
            else:
                made = (places * 3 + torch.arange(BATCH)[:, None]) % 5 - 1
            return made.to(self.device)
        seen = self.module.visible(q, None, None, **arguments, **({"mask": None} if "mask" in self.text.arguments else {}))
        seen = (seen if seen.dim() == 4 else seen[None, None]).expand(BATCH, -1, -1, -1)
        if given == "bool":
            return seen.clone()
        size = seen.shape[-1]
        shown = torch.zeros(size) if given == "float" else -2e4 - torch.arange(size).float()
        return torch.where(seen, shown.to(self.device), -torch.inf if given == "float" else -1e9).to(self.dtype)

    def step(self, count: int, eager: bool = False) -> None:
        """Call the module with ``count`` random tokens, uncompiled where ``eager``."""
        choice, shape = self.choice, (BATCH, heads_of(self.choice), count, DIM)
        q = torch.randn(BATCH, HEADS, count, DIM) * (1e4 if choice["queries"] == "large" else 1.0)
        if choice["layout"] == "cross":
            shape = (*shape[:2], ENCODED, DIM)
        k, v = drawn_tokens(shape, choice), drawn_tokens(shape, choice)
        if choice["places"] == "twice" and count > 1:
            k[:, :, -1], v[:, :, -1] = k[:, :, -2], v[:, :, -2]
        pos = self.positions(count)
        self.places.append(pos.expand(BATCH, -1))
        q, k, v = (item.to(self.dtype).to(self.device) for item in (q, k, v))
        wanted = self.text.arguments
        known = {"pos": pos.to(self.device), "start": self.start, "table": self.table, **self.caches}
        arguments = {name: known[name] for name in wanted if name in known}
        if "mask" in wanted:
            arguments["mask"] = self._mask(arguments, q)
        self.sight.append(self.module.sighted(q, None, None, **arguments).any(-1))
        new = (None, None) if choice["layout"] == "cross" and self.past else (k, v)
        out, kc, vc, more = (self.module if eager else self.call)(q, *new, **arguments)
        if choice["layout"] == "concatenated":
            self.caches = {"kc": kc, "vc": vc}
        self.results.append(out)
        if more is not None and self.choice["watched"] == "each":
            self.more.append(more)
        self.start += count - (choice["places"] == "twice" and count > 1)
        if choice["positions"] == "python-counter" and self.module.now != self.start:
            self.module.now = self.start
        self._settle_rows(count)
        self.past = True

    def out_of_order(self) -> bool:
        """Whether a row was given a token that neither follows its last one nor begins it again at 0."""
        ends = torch.zeros(BATCH, dtype=torch.int64)
        for pos in self.places:
            first = pos[:, 0]
            if bool(((first != ends) & (first != 0)).any()) or not torch.equal(pos, first[:, None] + torch.arange(pos.shape[1])):
                return True
            ends = first + pos.shape[1]
        return False

    def skips_forgotten(self) -> bool:
        """Whether a row once went back, and later skipped positions of the tokens that it had held there."""
        ends = tops = torch.zeros(BATCH, dtype=torch.int64)
        for pos in self.places:
            if bool(((pos[:, 0] > ends) & (tops > ends)).any()):
                return True
            ends = pos.amax(1) + 1
            tops = torch.maximum(tops, ends)
        return False

    def _settle_rows(self, count: int) -> None:
        """Let rows fall behind: one for good where lengths are their own, one after the other where drafts are refused."""
        if self.choice["places"] == "own-lengths" and not self.past:
            self.behind = [0, min(2, count - 1)]
        if self.choice["places"] == "accepted" and (count > 1 or len(self.results) == FIRST):
            row = len(self.results) % BATCH
            self.behind[row] = min(self.behind[row] + 1, self.start)

    def watch(self) -> None:
        """Keep what the caches hold of the tokens so far."""
        layout = self.choice["layout"]
        whole = layout in {"ring", "concatenated", "cross"}
        length = self.start - max(self.behind)
        for cache in self.tensors() if layout in {"concatenated", "cross", "ring"} else self._decoded():
            value = kvcompile.decoded(cache) if whole else cache
            self.states.append((value if whole else value[:BATCH, :, :length]).clone())

    def _decoded(self) -> list[Tensor]:
        """``held`` of plain tensors."""
        run = copy.copy(self)
        plain = [kvcompile.decoded(cache) for cache in self.tensors()]
        run.tensors = lambda: plain  # type: ignore[method-assign]
        return run.held()

    def play(self) -> None:
        """Run the whole script."""
        choice = self.choice
        for number, count in enumerate(map(int, choice["chunks"].split(","))):
            if number in {FIRST, SECOND}:
                EVENTS[choice["event" if number == FIRST else "then"]].act(self)
                if choice["watched"] == "each":
                    self.watch()
            self.step(count, eager=choice["prompt"] == "eager" and not number)
            if number == 0 and "earlier-state" in {choice["event"], choice["then"]}:
                self.snapshot = copy.deepcopy(self.module.state_dict()), self.start
        self.watch()
