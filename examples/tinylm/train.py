"""Trains tinylm on the text of this machine and writes the model folder.

    python examples/tinylm/train.py --minutes 6.5 --out examples/tinylm
    python examples/tinylm/train.py --minutes 9 --curriculum 0.3x512,0.3x4352,0.4x16640 --out OUT

Short sequences come first, long ones after (`--curriculum`: shares of the time, and lengths); the
longest is the model's context. Time, not steps, ends the run, so that it fits a
limit. `--smoke` makes a model of a few steps on a CPU, to test the script itself.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

STARTED = time.monotonic()
HERE = Path(__file__).resolve().parent
if __package__ in (None, ""):
    # The folder of examples, and the repository: questions are built by kvcompile.tools.evaluation.
    sys.path[:1] = [str(HERE.parent), str(HERE.parents[1])]

import torch
import transformers
from rich.console import Console
from rich.progress import Progress, TextColumn, TimeElapsedColumn
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from tinylm import corpus, evaluate, mixture
from tinylm.network import MAX_LENGTH, loss_function, new_model, save

console = Console(width=120)


@dataclass(frozen=True)
class Recipe:
    """Settings of one training run."""

    minutes: float = 6.5
    tokens_per_step: int = 131_072
    # Shares of the run and their lengths, the last of which is the model's context.
    curriculum: tuple[tuple[float, int], ...] = ((0.35, 512), (0.65, MAX_LENGTH))
    peak_rate: float = 2.5e-3
    warmup_share: float = 0.02
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    most_steps: int = 10**9
    # Minutes from the start of the process by which training ends, whatever came before it.
    deadline: float = 1e6
    eval_count: int = 200
    eval_contexts: tuple[int, ...] = (256, 1000, 2000, 4000, 4090, 8000, 16000)

    @property
    def context(self) -> int:
        """Tokens that the model is made for."""
        return max(length for _, length in self.curriculum)

    def length_at(self, share: float) -> int:
        """The sequence length at a share of the run."""
        ended = 0.0
        for part, length in self.curriculum:
            ended += part
            if share < ended:
                return length
        return self.curriculum[-1][1]


@dataclass
class History:
    """What the run saw, for the log."""

    losses: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    trained_bytes: int = 0


class Trainer:
    """One run: data, optimizer, clock and history."""

    def __init__(
        self,
        model: LlamaForCausalLM,
        data: corpus.Corpus,
        recipe: Recipe,
        *,
        compiled: bool,
        workers: int,
    ) -> None:
        self.model, self.data, self.recipe, self.workers = model, data, recipe, workers
        self.device = next(model.parameters()).device
        self.history = History()
        losses = loss_function(model)
        self.losses = torch.compile(losses, dynamic=False) if compiled else losses
        matrices = [p for p in model.parameters() if p.dim() == 2]
        others = [p for p in model.parameters() if p.dim() != 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": recipe.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=recipe.peak_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self.rotary: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def batches(self, length: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Endless batches of one length on the device, made by worker processes."""
        rows = max(1, self.recipe.tokens_per_step // length)
        source = mixture.Batches(self.data, rows, length, self.recipe.seed)
        loader = DataLoader(
            source,
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=8 if self.workers else None,
            pin_memory=self.device.type == "cuda",
        )
        for ids, weights in loader:
            yield (
                ids.to(self.device, non_blocking=True).long(),
                weights.to(self.device, non_blocking=True),
            )

    def rotary_tables(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines (1, T, D) of all positions."""
        if length not in self.rotary:
            positions = torch.arange(length, device=self.device)[None]
            like = torch.empty(1, device=self.device)
            with torch.no_grad():
                self.rotary[length] = self.model.model.rotary_emb(like, positions)
        return self.rotary[length]

    def forward_backward(self, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Gradients of one batch; returns the (text, answer) losses."""
        cuda = self.device.type == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if cuda else nullcontext():
            loss, parts = self.losses(ids, weights, self.rotary_tables(ids.shape[1] - 1))
        loss.backward()
        return parts

    def rate(self, progress: float) -> float:
        """Learning rate at a share of the run: linear warm-up, then a cosine to zero."""
        warm = min(1.0, progress / self.recipe.warmup_share)
        return self.recipe.peak_rate * warm * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    def train(self) -> History:
        """Runs the curriculum until time or steps are over."""
        feeds = {length: self.batches(length) for _, length in self.recipe.curriculum}
        # All shapes compile before the clock starts.
        for feed in feeds.values():
            started = time.monotonic()
            batch = next(feed)
            try:
                self.forward_backward(*batch)
            except RuntimeError as error:
                # A lent machine is no place to debug a compiler: train without it instead.
                console.print(f"not compiled: {type(error).__name__}: {error}"[:2000])
                self.losses = loss_function(self.model)
                self.forward_backward(*batch)
            self.optimizer.zero_grad(set_to_none=True)
            console.print(f"first batch: {time.monotonic() - started:.1f} s")
        columns = (TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
            task = bar.add_task("training", total=1.0)
            self._loop(feeds, lambda text, share: bar.update(task, description=text, completed=share))
        return self.history

    def _loop(
        self,
        feeds: dict[int, Iterator[tuple[torch.Tensor, torch.Tensor]]],
        show: Callable[[str, float], None],
    ) -> None:
        recipe, history = self.recipe, self.history
        began = time.monotonic()
        limit = min(60 * recipe.minutes, STARTED + 60 * recipe.deadline - began)
        printed, recent = began, []
        while True:
            now = time.monotonic()
            share = max((now - began) / limit, history.steps / recipe.most_steps)
            if share >= 1:
                return
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate(share)
            ids, weights = next(feeds[recipe.length_at(share)])
            recent.append(self.forward_backward(ids, weights))
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), recipe.clip)
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            history.steps += 1
            history.trained_bytes += weights.numel()
            # Reading a loss waits for the device, which also keeps the clock honest.
            if history.steps % 50 == 0 or history.steps == recipe.most_steps:
                text, answer = (torch.stack(recent).mean(0) / math.log(2)).tolist()
                recent.clear()
                if not math.isfinite(text):
                    raise FloatingPointError(f"the loss is {text} at step {history.steps}")
                row = {
                    "step": history.steps,
                    "seconds": round(time.monotonic() - began, 1),
                    "length": weights.shape[1],
                    "bytes": history.trained_bytes,
                    "text_bits": round(text, 4),
                    "answer_bits": round(answer, 4),
                }
                history.losses.append(row)
                show(f"step {history.steps}: {text:.3f} bits, answers {answer:.3f}", share)
                if not console.is_terminal and time.monotonic() - printed > 10:
                    printed = time.monotonic()
                    console.print(row)


def versions(device: torch.device) -> dict[str, Any]:
    """Hardware and software of the run."""
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def curriculum(text: str) -> tuple[tuple[float, int], ...]:
    """Shares of the run and sequence lengths, from text such as `0.35x512,0.65x4352`."""
    pairs = [part.split("x") for part in text.split(",")]
    return tuple((float(share), int(length)) for share, length in pairs)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=Recipe.minutes)
    parser.add_argument("--deadline", type=float, default=Recipe.deadline)
    parser.add_argument("--steps", type=int, default=Recipe.most_steps)
    parser.add_argument("--rate", type=float, default=Recipe.peak_rate)
    parser.add_argument("--curriculum", type=curriculum, default=Recipe.curriculum, metavar="SHARExLENGTH,...")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--start-from", type=Path, help="a model folder to go on from")
    parser.add_argument("--corpus-seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=max(0, (os.cpu_count() or 1) - 2) // 2)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--smoke", action="store_true", help="a few tiny steps, on a CPU too")
    return parser.parse_args()


def main() -> None:
    """Trains, saves, evaluates the saved folder and writes its log."""
    options = arguments()
    recipe = Recipe(
        minutes=options.minutes,
        peak_rate=options.rate,
        curriculum=options.curriculum,
        seed=options.seed,
        most_steps=options.steps,
        deadline=options.deadline,
    )
    if options.smoke:
        recipe = Recipe(1.0, 1024, ((0.5, 256), (0.5, 512)), most_steps=20, eval_count=2, eval_contexts=(256,))
    device = torch.device(options.device)
    torch.set_float32_matmul_precision("high")
    seconds = 1.0 if options.smoke else options.corpus_seconds
    data = corpus.load(seconds, most_bytes=10**6 if options.smoke else 400_000_000)
    console.print(data.report)
    if options.start_from:
        model = LlamaForCausalLM.from_pretrained(options.start_from, dtype=torch.float32)
        model.config.max_position_embeddings = recipe.context
    else:
        model = new_model(recipe.seed, recipe.context)
    model = model.to(device).train()
    command = " ".join(["python", "examples/tinylm/train.py", *sys.argv[1:]])
    log: dict[str, Any] = {
        "command": command.replace(str(options.out), "OUT"),
        "hardware": versions(device),
        "parameters": sum(p.numel() for p in model.parameters()),
        "recipe": asdict(recipe) | {"mixture": asdict(mixture.Mixture())},
        "corpus": data.report,
    }
    compiled = device.type == "cuda" and not options.no_compile
    trainer = Trainer(model, data, recipe, compiled=compiled, workers=options.workers)
    history = trainer.train()
    log |= {"steps": history.steps, "trained_bytes": history.trained_bytes}
    log["losses"] = history.losses[:: max(1, len(history.losses) // 100)]
    saved = save(model, options.out).to(device)
    began = time.monotonic()
    for stage in ("trained", "evaluated"):
        if stage == "evaluated":
            log["evaluation"] = evaluate.summary(
                saved,
                [length for length in recipe.eval_contexts if length < recipe.context],
                recipe.eval_count,
                seed=1,
                batch_size=16,
            )
            log["evaluation_seconds"] = round(time.monotonic() - began, 1)
            console.print(log["evaluation"])
        # Written before the evaluation too: a run that is cut short keeps its log.
        (options.out / "train_log.json").write_text(json.dumps(log, indent=1) + "\n")


if __name__ == "__main__":
    main()
