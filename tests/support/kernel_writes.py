"""What a Triton kernel writes, as torch reads it in the kernel's code, which it compiles to TTIR for that; no device is needed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvcompile.lowering.host.launches import KernelLaunch


class DeviceStandIn:
    """What triton asks of a driver to lower a kernel."""

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


def stand_in_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let triton lower kernels on a machine without a device."""
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", DeviceStandIn())


def written_by(launch: KernelLaunch) -> dict[str, torch.Tensor]:
    """Arguments of a launch that its kernel writes, by name; torch 2.12 renamed who finds them."""
    from torch._higher_order_ops import triton_kernel_wrap

    if hasattr(triton_kernel_wrap, "identify_accessed_tensors"):
        found = triton_kernel_wrap.identify_accessed_tensors(launch.kernel, launch.arguments, {})
        names = [dependency.name for dependency in found.read_writes.writes]
    else:
        names = triton_kernel_wrap.identify_mutated_tensors(launch.kernel, launch.arguments, {})
    return {name: launch.arguments[name] for name in names if isinstance(launch.arguments[name], torch.Tensor)}
