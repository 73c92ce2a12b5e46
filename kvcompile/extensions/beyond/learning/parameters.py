"""The learned parameters: levels and thresholds of each slot by module path, and the tables made from them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcompile.errors import BadTables
from kvcompile.extensions.beyond.scheme import Beyond
from kvcompile.extensions.beyond.tables import ModelTables, SiteTables, Table, uniform_table
from kvcompile.types import Role


@dataclass(frozen=True)
class SlotParameters:
    """One slot's levels and thresholds, float32 in units of scales, and two operands of zeros whose gradients are G_L and G_R."""

    levels: torch.Tensor
    thresholds: torch.Tensor
    left: torch.Tensor
    right: torch.Tensor

    @staticmethod
    def uniform(bits: int, heads: int, groups: int, device: torch.device) -> SlotParameters:
        """Return new parameters for ``heads`` kv heads of ``groups`` groups of channels, with the tables of plain asymmetric codes.

        ``bits``: the width of a code. All tensors are on ``device`` and require gradients.
        """
        table = uniform_table(bits, heads, groups)
        nothing = torch.zeros_like(table.thresholds, device=device)
        return SlotParameters(
            table.levels.to(device).requires_grad_(), table.thresholds.to(device).requires_grad_(), nothing.clone().requires_grad_(),
            nothing.clone().requires_grad_(),
        )

    @property
    def operands(self) -> tuple[torch.Tensor, ...]:
        """The inputs of the graph, in the order of ``hard_quantize``."""
        return self.levels, self.thresholds, self.left, self.right

    def table(self) -> Table:
        """Return a copy of the parameters as the table for serving."""
        return Table(self.levels.detach().cpu().clone(), self.thresholds.detach().cpu().clone())

    def load(self, table: Table) -> None:
        """Copy the contents of ``table`` into the parameters, in place."""
        with torch.no_grad():
            self.levels.copy_(table.levels)
            self.thresholds.copy_(table.thresholds)


class Parameters:
    """The parameters of all attentions found so far, by module path and role, in the order in which they were found."""

    def __init__(self, scheme: Beyond) -> None:
        self.scheme = scheme
        self.slots: dict[tuple[str, Role], SlotParameters] = {}

    def of(self, path: str, role: Role, heads: int, head_dim: int, device: torch.device) -> SlotParameters:
        """Return the parameters of the slot of ``role`` at a module path; a slot not seen before gets new uniform ones, which are kept.

        Attentions of one module share them; raises BadTables if those attentions differ in shape.
        """
        key, groups = (path, role), head_dim // self.scheme.channels(head_dim)
        if key not in self.slots:
            self.slots[key] = SlotParameters.uniform(self.scheme.bits, heads, groups, device)
        held = tuple(self.slots[key].levels.shape[:2])
        if held != (heads, groups):
            where, both = path or "(root)", f"[kv heads, groups] {held} and {(heads, groups)}"
            raise BadTables(
                expected=f"attentions of one shape in the module {where}", found=both, todo="give each attention a module of its own",
            )
        return self.slots[key]

    def all(self) -> list[SlotParameters]:
        """Return the parameters of all slots, in the order in which they were found."""
        return list(self.slots.values())

    @property
    def paths(self) -> list[str]:
        """The module paths, in the order in which they were found."""
        return list(dict.fromkeys(path for path, _ in self.slots))

    def tables(self, fingerprint: str) -> ModelTables:
        """Return tables of levels and thresholds for every module, copied from the parameters; ``fingerprint``: that of the model."""
        sites = {path: SiteTables(*(self.slots[path, role].table() for role in (Role.KEY, Role.VALUE))) for path in self.paths}
        return ModelTables(sites, fingerprint, self.scheme.group)

    def load(self, tables: ModelTables) -> None:
        """Copy the contents of a model's ``tables`` into the parameters, in place."""
        for (path, role), slot in self.slots.items():
            slot.load(tables.for_module(path).for_role(role))
