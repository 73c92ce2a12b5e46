"""One process of a model that is sharded over all: prompts and steps compiled by kvcompile, beside the whole model as it is.

Says ``right`` where its logits are within what the scheme loses; run by ``torchrun``.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import DynamicCache, StaticCache

import kvcompile

sys.path.insert(0, str(Path(__file__).parent / "models"))
from composed_modules import mesh  # noqa: E402
from e2e_models import llama  # noqa: E402

CASES = (("int8", "static", 0.05), ("int8", "growing", 0.05), ("kivi(bits=4,group=16,window=16)", "growing", 0.2))
PLAN = {
    **{f"self_attn.{name}_proj": ColwiseParallel() for name in "qkv"}, "self_attn.o_proj": RowwiseParallel(),
    "mlp.gate_proj": ColwiseParallel(), "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel(),
}


def drive(call: Any, cache: Any) -> torch.Tensor:
    """A prompt and forty steps: logits [S, B, V] of their last tokens."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for count in (12, *[1] * 40):
        token = torch.randint(0, 64, (2, count), generator=generator)
        found.append(call(token, past_key_values=cache).logits[:, -1])
    return torch.stack(found)


@torch.no_grad()
def main() -> None:
    """Compare, for every scheme with its cache and two requests."""
    dist.init_process_group("gloo")
    whole = llama(layers=4).eval()
    sharded = copy.deepcopy(whole)
    processes = mesh()
    for layer in sharded.model.layers:
        parallelize_module(layer, processes, PLAN)
    makers = {"static": lambda: StaticCache(whole.config, 64), "growing": lambda: DynamicCache(config=whole.config)}
    for scheme, kind, allowed in CASES:
        torch._dynamo.reset()
        backend = kvcompile.backend(scheme, strict=True)
        call = torch.compile(sharded, backend=backend)
        expected = drive(whole, makers[kind]())
        for _ in range(2):
            error = ((drive(call, makers[kind]()) - expected).norm() / expected.norm()).item()
            if not 1e-5 < error <= allowed:
                raise SystemExit(f"{scheme}, {kind} cache: off by {error:.2e}, allowed {allowed}")
        if backend.report().sites != 4 * len(backend.graphs):
            raise SystemExit(f"{scheme}, {kind} cache: not all attentions were rewritten\n{backend.report()}")
    print("right", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
