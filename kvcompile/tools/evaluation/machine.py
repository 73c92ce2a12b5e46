"""Machine: the device, cores and versions that a run of evaluation used, which are saved with its results."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from typing import Any

import torch

PACKAGES = ("kvcompile", "torch", "triton", "transformers", "tokenizers", "numpy")


def machine(device: str) -> dict[str, Any]:
    """Return the device's name, the processor, cores, threads, and versions of Python and installed packages."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else "cpu"
    return {
        "device": name, "processor": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "threads": torch.get_num_threads(), "python": platform.python_version(), "versions": versions,
    }
