"""Seconds from an uncompiled prompt to the third decode step, in new processes: once with empty caches on disk, then with full ones.

``python benchmarks/startup.py`` compares stock torch.compile with schemes on a 32-layer Llama of small widths, since only the graph counts.
The clock starts before ``import kvcompile`` and runs until the device has done three steps; imports of torch and transformers, the model
and its prompt come before it. Every configuration has caches of its own, filled by its first process.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

STEPS, PROMPT, ROOM = 3, 37, 256


def model_of(layers: int, device: str) -> Any:
    """Return a random bfloat16 (on a CPU float32) Llama of small widths whose heads are those of Llama 3.1 8B."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=256, intermediate_size=512, num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2, head_dim=128,
        vocab_size=1000, max_position_embeddings=4096,
    )
    return transformers.LlamaForCausalLM(config).to(device, torch.bfloat16 if device == "cuda" else torch.float32).eval()


def child(kind: str, layers: int, device: str, profile: Path | None) -> None:
    """Print the seconds after each of the first steps, as JSON."""
    import torch
    import transformers

    model = model_of(layers, device)
    cache = transformers.StaticCache(model.config, max_cache_len=ROOM)
    words = torch.randint(0, 1000, (1, PROMPT + STEPS), device=device)
    profiler, seconds = cProfile.Profile(time.process_time), list[float]()
    with torch.no_grad():
        model(words[:, :PROMPT], past_key_values=cache, use_cache=True)
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        if profile:
            profiler.enable()
        if kind == "stock":
            call = torch.compile(model, fullgraph=True)
        else:
            import kvcompile

            scheme, _, fold = kind.partition("+")
            call = torch.compile(model, backend=kvcompile.backend(scheme, strict=True, fold=bool(fold)), fullgraph=True)
        for step in range(PROMPT, PROMPT + STEPS):
            call(words[:, step : step + 1], past_key_values=cache, use_cache=True)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        if profile:
            profiler.disable()
            profiler.dump_stats(profile)
    print(json.dumps(seconds))


def started(kind: str, options: argparse.Namespace, folder: Path, profile: Path | None) -> list[float]:
    """Return what a new process with its caches in ``folder`` printed; raises RuntimeError where it failed."""
    command = [sys.executable, __file__, "--child", kind, "--layers", str(options.layers), "--device", options.device]
    if profile:
        command += ["--profile", str(profile)]
    folders = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **folders}, check=False)
    if done.returncode:
        raise RuntimeError(f"{kind}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(kind: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the seconds of one process with empty caches and of ``--rounds`` with full ones."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cold = started(kind, options, folder, None)
        warm = [started(kind, options, folder, None) for _ in range(options.rounds)]
        if options.profile:
            started(kind, options, folder, options.profile.with_suffix(f".{kind}.prof"))
    found = {"kind": kind, "cold": cold, "warm": warm, "warm_s": statistics.median(steps[-1] for steps in warm)}
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    """Run the configurations, side by side where ``--jobs`` says so, and print each against stock."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default="stock,int4,certified", help="stock, schemes, and schemes with +fold")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=3, help="processes with full caches")
    parser.add_argument("--jobs", type=int, default=1, help="configurations side by side")
    parser.add_argument("--profile", type=Path, help="write cProfiles of one more process each, with full caches")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.child:
        child(options.child, options.layers, options.device, options.profile)
        return
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda kind: measured(kind, options), options.kinds.split(",")))
    stock = next((row for row in rows if row["kind"] == "stock"), rows[0])
    for row in rows:
        ratios = row["cold"][-1] / stock["cold"][-1], row["warm_s"] / stock["warm_s"]
        print(f"{row['kind']:10} cold {row['cold'][-1]:.1f} s ({ratios[0]:.2f}x), warm {row['warm_s']:.1f} s ({ratios[1]:.2f}x)")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
