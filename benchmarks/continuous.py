"""transformers' continuous batching of the Llama-3.1-8B shape with random weights, over codes and as shipped.

    python benchmarks/continuous.py [--schemes int4,int8,stock] [--requests 64] [--prompts 1024-4096] [--new 64] [--blocks-of 256]
        [--layers 32] [--json FILE] [--limit SECONDS]

Every run serves the same requests twice in one engine, without shared blocks; the second time is reported. "Tokens a second": generated
tokens over the time from the arrival of all requests to the last one's end. "TTFT": time to a request's first token. "Step": time between
two tokens of a request. "stock" is the engine as shipped with SDPA, which reads all requests' tokens for every query through a mask; its
flash path needs a package that is not used here.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import pathlib
import statistics
import sys
import time
from typing import Any

import torch

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent)]

from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import kvcompile.serving


def model_of(layers: int) -> Any:
    """The 8B shape in bfloat16, on the device from the start."""
    config = LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=128256, max_position_embeddings=131072, rope_theta=500000.0, dtype="bfloat16",
    )
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        made = LlamaForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return made


def serve(model: Any, prompts: list[list[int]], new: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Serve the prompts twice, and return what the second time took."""
    greedy = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    found: dict[str, Any] = {}
    with model.continuous_batching_context_manager(
        generation_config=greedy, continuous_batching_config=ContinuousBatchingConfig(**settings)
    ) as manager:
        for _ in range(2):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            names = manager.add_requests(inputs=prompts, max_new_tokens=new, streaming=True)
            times: dict[str, list[float]] = {name: [] for name in names}
            done, failed = set(), []
            while len(done) < len(names):
                result = manager.get_result(timeout=1)
                if result is None:
                    if not manager.is_running():
                        raise RuntimeError("the engine stopped")
                    continue
                times[result.request_id].append(time.perf_counter() - begun)
                if result.error is not None:
                    failed.append(str(result.error))
                if result.is_finished():
                    done.add(result.request_id)
            if failed:
                raise RuntimeError(failed[0][:300])
            took = time.perf_counter() - begun
            steps = [b - a for each in times.values() for a, b in itertools.pairwise(each)]
            firsts = sorted(each[0] for each in times.values())
            found = {
                "tokens_a_second": len(prompts) * new / took, "seconds": took, "ttft_median_s": statistics.median(firsts),
                "ttft_last_s": firsts[-1],
                "step_ms": statistics.median(steps) * 1e3, "step_p99_ms": sorted(steps)[int(len(steps) * 0.99)] * 1e3,
            }
        cache = manager.batch_processor.cache if manager.batch_processor else None
        found["blocks"] = getattr(cache, "num_blocks", None)
    return {**found, "peak_GB": torch.cuda.max_memory_allocated() / 1e9}


def main() -> None:
    """Print one row for each scheme."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default="int4,int8,dense,stock")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompts", default="1024-4096")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--page", type=int, default=256)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which nothing new is begun")
    options = parser.parse_args()
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    low, high = map(int, options.prompts.split("-"))
    generator = torch.Generator().manual_seed(0)
    sizes = torch.randint(low, high + 1, (options.requests,), generator=generator).tolist()
    prompts = [torch.randint(5, 128000, (size,), generator=generator).tolist() for size in sizes]
    blocks = sum(-(-(size + options.new) // options.page) + 1 for size in sizes)
    begun, rows = time.time(), []
    model = model_of(options.layers)
    print(torch.__version__, torch.cuda.get_device_name(), f"{options.requests} requests, {sum(sizes)} tokens of prompts", flush=True)
    for scheme in options.schemes.split(","):
        if time.time() - begun > options.limit:
            break
        settings = {"num_blocks": blocks, "page_size": options.page, "max_batch_tokens": options.batch_tokens, "allow_block_sharing": False}
        torch.cuda.reset_peak_memory_stats()
        try:
            if scheme != "stock":
                kvcompile.serving.install(model, scheme)
            rows.append({"scheme": scheme, **serve(model, prompts, options.new, settings)})
        except Exception as error:
            rows.append({"scheme": scheme, "failed": f"{type(error).__name__}: {str(error)[:300]}"})
        finally:
            if scheme != "stock":
                kvcompile.serving.remove(model)
        texts = (f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in rows[-1].items())
        print(*texts, flush=True)
        torch.cuda.empty_cache()
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "requests": options.requests, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
