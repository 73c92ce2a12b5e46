"""Host reads: on which devices the host may look at a tensor's numbers in every step.

On a CPU a look costs nothing. Elsewhere it waits for the device, which no decode step does: there a call's positions are not looked at,
and what depends on them is checked on the device (``ops.append_window``). All of the runtime asks here, so that a test can run that way
on a CPU.
"""

from __future__ import annotations

import torch


def free(device: torch.device) -> bool:
    """Whether the host reads numbers of a device without a wait."""
    return device.type == "cpu"
