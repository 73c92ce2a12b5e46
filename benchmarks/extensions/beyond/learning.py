"""Learning tables for a Llama-3.1-8B-shaped model with random weights: tokens a second and peak memory of an optimizer step.

    python benchmarks/extensions/beyond/learning.py [--layers 32] [--tokens 8192] [--rows 1] [--scheme beyond] [--memory-budget 1.0]
            [--json FILE]
    python benchmarks/extensions/beyond/learning.py --layers 2 4          the short form: what 32 layers take is reckoned from the two
    python benchmarks/extensions/beyond/learning.py --tiny                a small model on a CPU, to try the script itself

A step here is one piece of a batch, forward and backward, with Adam and the projection: the source's batch of 32 sequences takes as
much 32 times, but for the last two. Correctness gate: losses and gradients are finite, and every slot of every layer has a gradient.
Beside it the same model without quantizers, compiled by stock torch.compile: forward and backward to the embeddings, which keeps all
activations, and forward without gradients, the least that any training of this kind does.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import transformers
from rich.console import Console

from kvcompile.extensions.beyond.learning.loss import NextToken
from kvcompile.extensions.beyond.learning.settings import LearnSettings
from kvcompile.extensions.beyond.learning.trainer import Trainer
from kvcompile.schemes import parse
from kvcompile.settings import Inner
from kvcompile.tools.evaluation.machine import machine

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from turns import turn

LAYERS = 32
"""Layers of the model whose shape is measured."""


@dataclass(frozen=True)
class Measured:
    """One number of layers; seconds of a step, its median, and bytes."""

    layers: int
    tokens: int
    step: float
    both: float
    forward: float
    weights: int
    peak: int
    compiling: float


def build(layers: int, tiny: bool, device: str) -> torch.nn.Module:
    """The model with random weights, nothing read."""
    hidden, inner, heads, kv_heads, words = (128, 256, 4, 2, 256) if tiny else (4096, 14336, 32, 8, 128256)
    config = transformers.LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_attention_heads=heads, num_key_value_heads=kv_heads, vocab_size=words,
        num_hidden_layers=layers, head_dim=32 if tiny else 128, max_position_embeddings=131072, rope_theta=500000.0
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    model = model.to_empty(device=device).eval().requires_grad_(False)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    # What angles of RoPE are made of is a buffer.
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model


def measure(layers: int, given: argparse.Namespace, device: str) -> Measured:
    """Take a few steps."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch._dynamo.reset()
    model = build(layers, given.tiny, device)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    settings = LearnSettings(memory_budget=given.memory_budget, inner=Inner(given.inner), compared=False)
    trainer = Trainer(model, parse(given.scheme), settings, NextToken(model))
    generator = torch.Generator().manual_seed(1)
    batch = torch.randint(0, model.config.vocab_size, (given.rows, given.tokens), generator=generator).to(device)
    begun = time.perf_counter()
    trainer.learn([batch])
    _sync(device)
    compiling = time.perf_counter() - begun
    if len(trainer.parameters.slots) != 2 * layers:
        raise SystemExit(f"expected {2 * layers} slots, found {len(trainer.parameters.slots)}: {trainer.backend.refusals[:1]}")
    for slot in trainer.parameters.all():
        if slot.levels.grad is None or not bool(slot.levels.grad.isfinite().all()) or not bool(slot.levels.grad.any()):
            raise SystemExit("a slot without a gradient, or with one that is not finite")

    def step() -> None:
        if not torch.isfinite(torch.tensor(trainer.learn([batch]))):
            raise SystemExit("gradients were not finite")

    def forward() -> None:
        with torch.no_grad():
            trainer.loss(stock, batch)

    def both() -> None:
        trainer.loss(stock, batch)[0].backward()
        model.model.embed_tokens.weight.grad = None

    stock = torch.compile(model, dynamic=False) if given.inner == "inductor" else model
    taken = timed(step, given.steps, device, given.turns)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    ahead = timed(forward, given.steps, device, given.turns)
    model.model.embed_tokens.weight.requires_grad_(True)
    around = timed(both, given.steps, device, given.turns)
    return Measured(layers, batch.numel(), taken, around, ahead, weights, peak, compiling)


def timed(run: Callable[[], None], count: int, device: str, turns: Path | None) -> float:
    """The median of ``count`` runs in seconds, behind one that is not counted."""
    found = []
    run()
    with turn(turns):
        for _ in range(count):
            _sync(device)
            begun = time.perf_counter()
            run()
            _sync(device)
            found.append(time.perf_counter() - begun)
    return statistics.median(found)


def reckoned(one: Measured, other: Measured) -> tuple[float, float]:
    """Seconds and bytes of ``LAYERS`` layers, on the line through two numbers of layers."""

    def line(name: str) -> float:
        each = (getattr(other, name) - getattr(one, name)) / (other.layers - one.layers)
        return float(getattr(one, name) + (LAYERS - one.layers) * each)

    return line("step"), line("peak")


def _sync(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def main(argv: list[str] | None = None) -> int:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs="+", default=[LAYERS])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--scheme", default="beyond")
    parser.add_argument("--memory-budget", type=float, default=1.0)
    parser.add_argument("--inner", choices=[item.value for item in Inner], default=Inner.INDUCTOR.value)
    parser.add_argument("--turns", type=Path, help="a file by whose lock processes that compile side by side take turns to be timed")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() and not given.tiny else "cpu"
    if given.tiny:
        given.tokens, given.layers, given.inner, given.steps = 64, [1, 2], Inner.EAGER.value, 1
    say = Console(width=140, highlight=False).print
    found = []
    for layers in given.layers:
        one = measure(layers, given, device)
        found.append(one)
        say(
            f"{layers} layers, {one.tokens} tokens: step {one.step:.3f} s, {one.tokens / one.step:,.0f} tokens/s, forward without "
            f"quantizers {one.forward:.3f} s, forward and backward {one.both:.3f} s, weights {one.weights / 1e9:.2f} GB, "
            f"peak {one.peak / 1e9:.2f} GB, first step {one.compiling:.1f} s"
        )
    if len(found) > 1 and LAYERS not in given.layers:
        step, peak = reckoned(found[0], found[-1])
        say(f"{LAYERS} layers, reckoned: step {step:.3f} s, {found[0].tokens / step:,.0f} tokens/s, peak {peak / 1e9:.1f} GB")
    if given.json:
        rows = [asdict(each) for each in found]
        given.json.write_text(json.dumps({"machine": machine(device), "scheme": given.scheme, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
