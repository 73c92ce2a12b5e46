"""Start vLLM once or more in this process and print a line of JSON for each: python engine_run.py MODEL REQUESTS, both JSON files' paths.

A request: ``scheme`` (null for vLLM's own backend, then alone in its process), ``settings`` of the engine, ``prompts``, ``new`` tokens of
each, ``rounds``. A line: tokens by round and prompt, tokens found in shared blocks, preemptions, blocks, or the error that a start raised.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.core.sched.scheduler import Scheduler

DEFAULTS: dict[str, Any] = {
    "skip_tokenizer_init": True, "enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8, "dtype": "float32", "block_size": 32,
    "max_num_batched_tokens": 64, "enable_chunked_prefill": True, "kv_cache_memory_bytes": 8 << 20,
}


def run(model: str, request: dict[str, Any]) -> dict[str, Any]:
    """One engine for one request."""
    if request["scheme"] is not None:
        os.environ["KVCOMPILE_SCHEME"] = request["scheme"]
    lost: list[str] = []
    preempt = Scheduler._preempt_request

    def counted(self: Scheduler, request: Any, *given: Any, **named: Any) -> None:
        lost.append(request.request_id)
        preempt(self, request, *given, **named)

    Scheduler._preempt_request = counted
    engine = LLM(model=model, **DEFAULTS | request.get("settings", {}))
    sampling = SamplingParams(temperature=0, max_tokens=request["new"], ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    rounds = [engine.generate(prompts, sampling, use_tqdm=False) for _ in range(request.get("rounds", 1))]
    found = {
        "tokens": [[list(result.outputs[0].token_ids) for result in results] for results in rounds],
        "shared": sum(result.num_cached_tokens or 0 for results in rounds for result in results), "preempted": len(lost),
        "blocks": engine.llm_engine.vllm_config.cache_config.num_gpu_blocks,
    }
    Scheduler._preempt_request = preempt
    return found


def main() -> None:
    """Print what each request gives."""
    for request in json.loads(Path(sys.argv[2]).read_text()):
        try:
            found = run(sys.argv[1], request)
        except Exception as error:  # noqa: BLE001 - the test looks at it
            found = {"error": f"{type(error).__name__}: {error}"}
        gc.collect()
        cleanup_dist_env_and_memory()
        print("FOUND", json.dumps(found), flush=True)


main()
