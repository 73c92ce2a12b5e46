"""RoPE on the host: apply and remove RoPE for stores of keys before RoPE, by the positions of the store's own tokens.

A key is stored so that the angles of its index in the store give the model's key again: RoPE with those angles is removed on write and
applied on read. If a row's positions begin at 0 with its first token, the stored key is the key before RoPE; else it is that key rotated
by one angle for the whole row. Either way the model's key is recovered without its position, which a cache that arrives filled does not
reveal. The angles of an index must never change, so the constants that define them are checked.
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
    """The angles of a graph's RoPE, with a copy of the constants that define them."""

    angles: Angles
    interleaved: bool
    constants: tuple[torch.Tensor, ...]

    def at(self, position: torch.Tensor) -> list[torch.Tensor]:
        """Return cosine and sine, each [1 or B, T, Dr], at positions [1 or B, T]."""

        def run(op: Callable[..., Any], *args: Any, **options: Any) -> Any:
            return op(*args, **options)

        with torch.no_grad():
            return tables(self.angles, run, position, self.constants, [item.shape for item in self.constants], position.device)

    def rotated(self, x_BKTD: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the model's keys [B, K, T, D] from stored keys at ``position`` [1 or B, T]."""
        exact = torch.promote_types(x_BKTD.dtype, torch.float32)
        cos, sin = (table.to(exact) for table in self.at(position))
        return apply_rope(x_BKTD.to(exact), cos, sin, self.interleaved).to(x_BKTD.dtype)

    def unrotated(self, x_BKTD: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the model's keys [B, K, T, D] at ``position`` with RoPE removed, as stored."""
        cos, sin = self.at(position)
        return undo_rope_body(x_BKTD, cos, sin, self.interleaved)

    def same(self, other: Rope, length: int, device: torch.device) -> bool:
        """Return whether another RoPE has the same angles at the first ``length`` positions."""
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
        """Return whether this call passes the constants of the last read, and they were not modified since."""
        return self.found is not None and all(
            at is None or (args[at] is tensor and _version(tensor) == version)
            for at, (tensor, version) in zip(self.arguments, self.seen, strict=True)
        )

    def read(self, args: tuple[Any, ...]) -> Rope:
        """Return the angles of this call; the same object as long as the constants do not change."""
        if self.found is None or not self.unchanged(args):
            given: list[Any] = [own if at is None else args[at] for at, own in zip(self.arguments, self.own, strict=True)]
            self.seen = tuple((tensor, _version(tensor)) for tensor in given)
            # A copy: later checks compare with the angles that the stored keys were written with.
            self.found = Rope(self.rope.angles, self.rope.interleaved, tuple(tensor.detach().clone() for tensor in given))
        return self.found

    def check(self, held: Rope | None, args: tuple[Any, ...], length: int, device: torch.device, where: str) -> Rope:
        """Return the angles of this call. Raises AnglesChanged if they differ from ``held``, those of a store of ``length`` tokens.

        ``held`` None: unknown.
        """
        found = self.read(args)
        if held is not None and held is not found and length and not held.same(found, length, device):
            raise AnglesChanged(length=length, where=where)
        return found


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
