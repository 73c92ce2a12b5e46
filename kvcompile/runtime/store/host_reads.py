"""Host reads: the devices whose tensors the host may read in every step.

On a CPU a read costs nothing. Elsewhere it waits for the device, which no decode step does: there a call's positions are not read, and
checks that depend on them run on the device (``ops.append_window``). The whole runtime decides by this module, so that a test can run the
code for devices on a CPU.
"""

from __future__ import annotations

import torch


def free(device: torch.device) -> bool:
    """Return whether the host can read a tensor of this device without waiting."""
    return device.type == "cpu"
