"""Kernels over one slot or two, keys and values, generated from the program of one slot, so that its parameters are written once.

Inductor passes operands to a kernel one by one and does not support tuples, so a kernel over two slots has every parameter twice. Its
source is generated from the program's signature: the first ``programs`` programs of a batch row call the program with the first slot's
operands, the others with the second's.
"""

from __future__ import annotations

import inspect
import linecache
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl

from kvcompile.lowering.host.launches import Launcher

BATCH = "b"
"""Name of a program's parameter for the batch row, if the grid has an axis for it; the first parameter is the program's number."""


@dataclass(frozen=True)
class SlotLaunch:
    """One slot's share of a launch: its number of programs (per batch row), operands in the kernel's order, constants by name."""

    programs: int
    operands: Sequence[object]
    constants: dict[str, Any]


@dataclass(frozen=True)
class SlotKernels:
    """The kernels over one slot (``one``) and over two (``two``)."""

    one: Any
    two: Any

    def start(self, launcher: Launcher, slots: Sequence[SlotLaunch], *batch: int, warps: int | None = None) -> None:
        """Launch the kernel over one slot or two by ``launcher``; ``batch``: number of batch rows, if the grid has an axis for them.

        ``warps``: number of warps of a program, None for Triton's default.
        """
        grid = (sum(slot.programs for slot in slots), *batch)
        operands = [operand for slot in slots for operand in slot.operands]
        first, *others = slots
        if not others:
            launcher.kernel(self.one, grid, *operands, warps=warps, **first.constants)
            return
        constants = first.constants | {f"{name}_2": value for name, value in others[0].constants.items()}
        launcher.kernel(self.two, grid, first.programs, *operands, warps=warps, **constants)


def slot_kernels(program: Any) -> SlotKernels:
    """Return the kernels ``X_one`` and ``X_two`` of a Triton function ``_X`` of a program's number, a slot's operands and constants."""
    function = program.fn
    own, *parameters = inspect.signature(function).parameters.values()
    rows = [each.name for each in parameters if each.name == BATCH]
    constants = [each.name for each in parameters if "constexpr" in str(each.annotation)]
    operands = [each.name for each in parameters if each.name not in {*rows, *constants}]

    def twice(names: list[str]) -> list[str]:
        return [*names, *(f"{name}_2" for name in names)]

    def head(kernel: str, names: list[str], fixed: list[str]) -> str:
        return f"def {kernel}({', '.join([*names, *(f'{name}: tl.constexpr' for name in fixed)])}):"

    def call(number: str, suffix: str = "") -> str:
        return f"{function.__name__}({', '.join([number, *rows, *(name + suffix for name in (*operands, *constants))])})"

    name, number = function.__name__.removeprefix("_"), own.name
    begin = [f"    {number} = tl.program_id(0)", *(f"    {row} = tl.program_id(1).to(tl.int64)" for row in rows)]
    text = [
        head(f"{name}_one", operands, constants), *begin, f"    {call(number)}", "",
        head(f"{name}_two", ["programs", *twice(operands)], twice(constants)), *begin, f"    if {number} < programs:",
        f"        {call(number)}", "    else:", f"        {call(f'{number} - programs', '_2')}", "",
    ]
    # Triton reads a function's source through linecache, as tracebacks do.
    file, scope = f"<{name} in {function.__module__}>", {"tl": tl, function.__name__: program, "__name__": function.__module__}
    linecache.cache[file] = (len(text), None, [f"{line}\n" for line in text], file)
    exec(compile("\n".join(text), file, "exec", dont_inherit=True), scope)  # noqa: S102 - text of this function's own
    return SlotKernels(*(triton.jit(scope[f"{name}_{count}"]) for count in ("one", "two")))
