"""Compiles all C++ kernels of a graph in one call of the compiler, which Inductor compiles one by one.

Half a second a kernel goes into reading torch's headers, also where they are precompiled, and into linking. Each kernel keeps its source
and its flags, in a namespace of its own. A kernel that this process has loaded already is not compiled again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch._inductor.async_compile import AsyncCompile
from torch._inductor.codecache import CppPythonBindingsCodeCache

ENTRY = re.compile(r'extern "C"\s+void\s+kernel\(')
INCLUDE = re.compile(r"^#include.*\n", re.MULTILINE)


@dataclass(frozen=True)
class Kernel:
    """The types of a kernel's arguments, and its source; stands for the kernel until all of its graph are known."""

    types: tuple[str, ...]
    source: str

    @property
    def joins(self) -> bool:
        """Whether the source has the one entry point that is looked for."""
        return len(ENTRY.findall(self.source)) == 1

    @property
    def call(self) -> str:
        """A statement that calls the kernel with the arguments of a tuple."""
        values = (f"parse_arg<{kind.replace('const ', '')}>(args, {index})" for index, kind in enumerate(self.types))
        return CppPythonBindingsCodeCache.call_entry_function.format(", ".join(values))


LOADED: dict[Kernel, Callable[..., Any]] = {}
"""What this process has compiled."""


def bindings(name: str, kernel: Kernel | None = None) -> tuple[str, str, str]:
    """Return Inductor's Python bindings of an entry point in three parts: what all share, the function, and the module."""
    text = CppPythonBindingsCodeCache.suffix_template.format(
        arg_len=len(kernel.types) if kernel else 0, call_entry_func=f"{name}::{kernel.call}" if kernel else "Py_RETURN_NONE;",
        entry_func=name, extra_parse_arg="",
    )
    function, module = text.index("static PyObject* "), text.index("static PyMethodDef ")
    return text[:function], text[function:module], text[module:]


def joined(kernels: Sequence[Kernel]) -> str:
    """Return one source with all kernels, ``k0`` and so on in its module."""
    shared, _, module = bindings("kernel")
    includes = dict.fromkeys(line for kernel in kernels for line in INCLUDE.findall(kernel.source))
    parts = [*includes]
    for index, kernel in enumerate(kernels):
        body = ENTRY.sub("static void kernel(", INCLUDE.sub("", kernel.source))
        parts.append(f"namespace k{index} {{\n{body}\n}}\n")
    parts += [shared, *(bindings(f"k{index}", kernel)[1] for index, kernel in enumerate(kernels))]
    entry = '{{"{0}", {0}_py, METH_VARARGS, ""}}'
    mine, names = entry.format("kernel"), [f"k{index}" for index in range(len(kernels))]
    assert mine in module, "the bindings of this torch look otherwise"
    return "".join([*parts, module.replace(mine, ", ".join(map(entry.format, names)))])


def load(kernels: Sequence[Kernel]) -> None:
    """Compile and load kernels that are not loaded."""
    new = [kernel for kernel in dict.fromkeys(kernels) if kernel not in LOADED]
    together = [kernel for kernel in new if kernel.joins]
    if len(together) > 1:
        module = CppPythonBindingsCodeCache.load(joined(together))
        LOADED.update((kernel, getattr(module, f"k{index}")) for index, kernel in enumerate(together))
    for kernel in new:
        if kernel not in LOADED:
            LOADED[kernel] = CppPythonBindingsCodeCache.load_pybinding(list(kernel.types), kernel.source)


def install() -> None:
    """Let Inductor's generated modules collect their kernels and compile them where they wait for them."""
    wait = AsyncCompile.wait

    def collect(self: AsyncCompile, argtypes: list[str], source_code: str) -> Kernel:
        return Kernel(tuple(argtypes), source_code)

    def wait_for_all(self: AsyncCompile, scope: dict[str, Any]) -> None:
        found = {name: item for name, item in scope.items() if isinstance(item, Kernel)}
        load(list(found.values()))
        scope.update((name, LOADED[kernel]) for name, kernel in found.items())
        wait(self, scope)

    AsyncCompile.cpp_pybinding = collect  # type: ignore[method-assign, assignment]
    AsyncCompile.wait = wait_for_all  # type: ignore[method-assign]
