"""Offline compilation of recorded launches for Hopper (sm_90) and others; needs no GPU."""

from __future__ import annotations

import pathlib
import re
import subprocess
import tempfile
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kvcompile.lowering.host.launches import KernelLaunch
from kvcompile.lowering.host.triton_api import POINTERS


def compiled_for_hopper(launch: KernelLaunch, capability: int = 90, aligned: bool = False) -> Any:
    """Compile the kernel of one launch with its constants; tensors are stand-ins, and other integers are int32.

    ``aligned``: tensors begin at multiples of 16 bytes, and whole numbers that are multiples of 16 are known to be, as at a real launch.
    """
    constants = {parameter.name for parameter in launch.kernel.params if parameter.is_constexpr}
    signature = {
        name: "constexpr" if name in constants else POINTERS[item.dtype] if isinstance(item, torch.Tensor)
        else "fp32" if isinstance(item, float) else "i32"
        for name, item in launch.arguments.items()
    }
    given = {(at,): item for at, (name, item) in enumerate(launch.arguments.items()) if name in constants}
    known = {
        (at,): [["tt.divisibility", 16]] for at, (name, item) in enumerate(launch.arguments.items())
        if aligned and name not in constants and (isinstance(item, torch.Tensor) or (isinstance(item, int) and item and item % 16 == 0))
    }
    return triton.compile(
        ASTSource(launch.kernel, signature, given, known), target=GPUTarget("cuda", capability, 32), options={"num_warps": launch.warps},
    )


def usage(cubin: Any) -> dict[str, int]:
    """Return what ``cuobjdump`` prints of a kernel: registers a thread (REG), bytes of stack (STACK) and of shared memory (SHARED)."""
    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name: int(count) for name, count in re.findall(r"(REG|STACK|SHARED):(\d+)", said)}


def resources(compiled: Any) -> dict[str, int]:
    """Registers a thread, bytes of stack and of shared memory of a compiled kernel."""
    found = usage(compiled.asm["cubin"])
    return {"registers": found["REG"], "stack": found["STACK"], "shared": int(compiled.metadata.shared)}
