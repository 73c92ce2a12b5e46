"""Fast: settings of a process that compiles thousands of programs, none of which changes a result."""

from __future__ import annotations

import gc
import logging
import warnings

import torch
from torch._dynamo import guards


def prepare() -> None:
    """Set up this process: one thread, few collections of garbage, no measuring of guards, no messages that nobody reads."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("kvcompile").setLevel(logging.CRITICAL)
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    config = torch._dynamo.config
    # A full collection after every graph, and a flushed cache to measure how long its guards take.
    config.run_gc_after_compile = False
    guards.profile_guard_manager = lambda *measured: 0.0
    # A message with two stacks for every attribute that traced code sets.
    if hasattr(config, "side_effect_replay_policy"):
        config.side_effect_replay_policy = "silent"
    # Pytest and torchrun listen here; a handler makes torch print every graph of every stage.
    trace = logging.getLogger("torch.__trace")
    trace.addHandler = lambda handler: None  # type: ignore[method-assign]
    trace.handlers.clear()
    # Tracing makes millions of objects that stay.
    gc.set_threshold(200_000, 20, 50)
    gc.collect()
    gc.freeze()
