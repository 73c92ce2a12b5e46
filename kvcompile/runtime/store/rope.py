"""RoPE on the host: a store may hold keys as they are before RoPE, and applies or removes it by the positions of its own tokens.

A key is stored so that the angles of its place in the store give the model's key again: RoPE with those angles is removed when the key is
written, and applied when it is read. Where a row's positions begin at 0 with its first token, that is the key before RoPE; where they begin
elsewhere it is that key rotated by one angle for the whole row. Either way the model's key comes back whatever its position was, which a
cache that arrives filled does not tell. The angles of a place must never change: the constants behind them are watched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvcompile.errors import AnglesChanged
from kvcompile.lowering.ops.operations import apply_rope, undo_rope_body
from kvcompile.passes.capture.capture import Captured
from kvcompile.passes.match.rope.angles import Angles, tables
from kvcompile.passes.match.rope.rope import KeyRope


@dataclass(frozen=True, eq=False)
class Rope:
    """The angles of a graph's RoPE, with a copy of the constants that they are computed from."""

    angles: Angles
    interleaved: bool
    constants: tuple[torch.Tensor, ...]

    def at(self, position: torch.Tensor) -> list[torch.Tensor]:
        """Return cosine and sine, [1 or B, T, Dr] each, at positions [1 or B, T]."""

        def run(op: Callable[..., Any], *args: Any, **options: Any) -> Any:
            return op(*args, **options)

        with torch.no_grad():
            return tables(self.angles, run, position, self.constants, [item.shape for item in self.constants], position.device)

    def rotated(self, x_BKTD: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the model's keys from stored ones."""
        exact = torch.promote_types(x_BKTD.dtype, torch.float32)
        cos, sin = (table.to(exact) for table in self.at(position))
        return apply_rope(x_BKTD.to(exact), cos, sin, self.interleaved).to(x_BKTD.dtype)

    def unrotated(self, x_BKTD: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the model's keys as they are stored, before RoPE."""
        cos, sin = self.at(position)
        return undo_rope_body(x_BKTD, cos, sin, self.interleaved)

    def same(self, other: Rope, length: int, device: torch.device) -> bool:
        """Whether another RoPE gives the same angles to the first ``length`` tokens."""
        if self.angles == other.angles and self.interleaved == other.interleaved and _equal(self.constants, other.constants):
            return True
        position = torch.arange(length, device=device).unsqueeze(0)
        return self.interleaved == other.interleaved and _equal(self.at(position), other.at(position))


def _equal(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    return all(a is b or (a.shape == b.shape and torch.equal(a, b)) for a, b in zip(ours, theirs, strict=True))


class RopeReader:
    """Reads the angles of a graph's RoPE from the constants among a call's arguments."""

    def __init__(self, captured: Captured, rope: KeyRope) -> None:
        self.rope = rope
        index = {entry.node: entry.index for entry in captured.inputs}
        self.arguments = [index.get(node) for node in rope.constants]
        self.own = [getattr(captured.module, str(node.target)) if node.op == "get_attr" else None for node in rope.constants]
        self.seen: tuple[tuple[torch.Tensor, int], ...] = ()
        self.found: Rope | None = None

    def unchanged(self, args: tuple[Any, ...]) -> bool:
        """Whether this call's constants are those of the last."""
        return self.found is not None and all(
            at is None or (args[at] is tensor and _version(tensor) == version)
            for at, (tensor, version) in zip(self.arguments, self.seen, strict=True)
        )

    def read(self, args: tuple[Any, ...]) -> Rope:
        """Return the angles of this call; the same object as long as nothing changes."""
        if self.found is None or not self.unchanged(args):
            given: list[Any] = [own if at is None else args[at] for at, own in zip(self.arguments, self.own, strict=True)]
            self.seen = tuple((tensor, _version(tensor)) for tensor in given)
            # A copy: what is compared later are the angles that the stored keys were written with.
            self.found = Rope(self.rope.angles, self.rope.interleaved, tuple(tensor.detach().clone() for tensor in given))
        return self.found

    def check(self, held: Rope | None, args: tuple[Any, ...], length: int, device: torch.device, where: str) -> Rope:
        """Return the angles of this call, for a store that was written with ``held``; raises AnglesChanged where they differ."""
        found = self.read(args)
        if held is not None and held is not found and length and not held.same(found, length, device):
            raise AnglesChanged(length=length, where=where)
        return found


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
