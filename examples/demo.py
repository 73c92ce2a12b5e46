"""Demo: tinylm generates from real prompts, its cache dense beside its cache compressed; every number is measured here.

All sides are compiled by Inductor, run the same loop on the same StaticCache, and decode greedily: stock
``torch.compile``, and the same call with kvcompile's backend, once with the scheme ``dense``, which shows what its
kernels do without compression, and once compressed. No GPU is needed.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.columns import Columns
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

HERE = Path(__file__).resolve().parent
# In a clone, the package beside this folder; in an installed package there is none, and its own folder must not be searched.
sys.path[:0] = [str(HERE), *([str(HERE.parent)] if (HERE.parent / "kvcompile").is_dir() else [])]

from tinylm import codec, corpus, tasks  # noqa: E402

import kvcompile  # noqa: E402
from kvcompile.explain import described  # noqa: E402
from kvcompile.report import size_text  # noqa: E402
from kvcompile.tools.cli.targets import TargetOptions, resolve, static_cache  # noqa: E402

DENSE, STOCK, OURS = "dense", "stock torch.compile", "kvcompile, {scheme}"
PROMPT_END = b"    def is_closing(self):\n"
"""Where the prompt ends in tinylm's unseen text: in the middle of a class of asyncio."""

console = Console(width=None if sys.stdout.isatty() else 110, highlight=False)


@dataclass(frozen=True)
class Generated:
    """What one side wrote after a prompt, and how long the steps after the prefill took."""

    ids: torch.Tensor
    seconds: float
    cache: Any

    @property
    def text(self) -> str:
        """The bytes as text."""
        return codec.decode(self.ids[0].tolist())

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return (self.ids.shape[1] - 1) / self.seconds


class Side:
    """One compiled model; ``owner`` is its kvcompile backend, None for stock."""

    def __init__(self, name: str, model: Any, owner: kvcompile.Backend | None, capacity: int) -> None:
        self.name, self.plain, self.owner, self.capacity = name, model, owner, capacity
        # Every call has one of two shapes, the prompt's and a step's: each is compiled once.
        self.model = torch.compile(model, dynamic=False, backend=owner or "inductor")

    @torch.no_grad()
    def run(self, prompt: torch.Tensor, choose: Callable[[int, torch.Tensor], torch.Tensor], steps: int) -> Generated:
        """Prefill, then ``steps`` single tokens; ``choose(step, logits)`` is what is fed next."""
        cache = static_cache(self.plain, self.capacity)
        logits = self.model(input_ids=prompt, past_key_values=cache, use_cache=True).logits[:, -1]
        said = [logits.argmax(-1, keepdim=True)]
        _wait(prompt.device)
        started = time.perf_counter()
        for step in range(steps):
            logits = self.model(input_ids=choose(step, said[-1]), past_key_values=cache, use_cache=True).logits[:, -1]
            said.append(logits.argmax(-1, keepdim=True))
        _wait(prompt.device)
        return Generated(torch.cat(said, 1), time.perf_counter() - started, cache)

    def generate(self, prompt: torch.Tensor, steps: int) -> Generated:
        """Greedy generation: its own tokens are fed back."""
        return self.run(prompt, lambda step, last: last, steps)

    def follow(self, prompt: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
        """The likeliest next token after each true one."""
        return self.run(prompt, lambda step, last: truth[0, step : step + 1][None], truth.shape[1]).ids

    def cache_bytes(self, cache: Any) -> int:
        """Bytes that the cache really holds: of its tensors, or of the stores behind them."""
        if self.owner is not None:
            return self.owner.report().allocated
        return sum(layer.keys.untyped_storage().nbytes() + layer.values.untyped_storage().nbytes() for layer in cache.layers)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def doing(what: str) -> Iterator[None]:
    """A line with the time that a step took; a spinner meanwhile on a terminal."""
    started = time.perf_counter()
    with console.status(what):
        yield
    console.print(f"[dim]{time.perf_counter() - started:5.1f} s[/]  {what}")


def prompts(length: int, tail: int, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, tasks.Example]:
    """A piece of unseen Python, what really follows it, a needle question of the same length, and its answer."""
    text = corpus.heldout_text()
    start = text.index(PROMPT_END) + len(PROMPT_END) - length
    source = codec.encode_tensor(text[start : start + length + tail]).to(device)
    example = tasks.examples("needle", 1, length, text, seed=7)[0]
    question = codec.encode_tensor(example.prompt_bytes)[None].to(device)
    # Cut before the batch dim is added: Dynamo compiles again for other strides, even of a dim of one.
    return source[: length + 1][None], source[length + 1 :][None], question, example


def panel(side: Side, prompt: torch.Tensor, text: str, width: int) -> Panel:
    """The end of the prompt, dimmed, and what was written after it."""
    shown = Text(codec.decode(prompt[0, -160:].tolist()).partition("\n")[2], style="dim")
    return Panel(shown.append(text, style="not dim bold"), title=side.name, width=width)


def beside(sides: list[Side], prompt: torch.Tensor, texts: list[str]) -> Columns:
    """The texts beside each other."""
    width = console.width // len(sides) - 1
    return Columns([panel(side, prompt, text, width) for side, text in zip(sides, texts, strict=True)], padding=(0, 1))


def common(first: str, second: str) -> int:
    """How many characters two texts share from the start."""
    return next((index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))


@dataclass(frozen=True)
class Outcome:
    """What one side did, and the bytes that its cache then held."""

    run: Generated
    held: int
    answer: str
    followed: torch.Tensor


def measure(side: Side, source: torch.Tensor, truth: torch.Tensor, question: torch.Tensor, answer_bytes: int) -> Outcome:
    """Write on from the source, answer the question, predict the real text."""
    answer = side.generate(question, answer_bytes - 1).text
    followed = side.follow(source, truth)
    # The caches of those two are gone, whatever cycles they were part of.
    gc.collect()
    run = side.generate(source, truth.shape[1])
    return Outcome(run, side.cache_bytes(run.cache), answer, followed)


def figures(sides: list[Side], outcomes: list[Outcome]) -> Table:
    """Speed, memory and agreement of each side; the others' also in terms of the first, which is stock."""
    table = Table(title="measured on this machine, just now", title_justify="left", header_style="bold")
    table.add_column("")
    for side in sides:
        table.add_column(side.name, justify="right")
    first, others = outcomes[0], outcomes[1:]
    rates = [f"{item.run.rate:.0f} ({item.run.rate / first.run.rate:.2f} x)" for item in others]
    table.add_row("tokens a second, decoding", f"{first.run.rate:.0f}", *rates)
    held = [f"{size_text(item.held)} ({item.held / first.held:.1%})" for item in others]
    table.add_row("bytes the cache holds", size_text(first.held), *held)
    same = [item.followed == first.followed for item in others]
    table.add_row("same next byte, fed the real text", "", *(f"{int(each.sum())} of {each.numel()}" for each in same))
    return table


def main(argv: Sequence[str] | None = None) -> None:
    """Run the demo; ``argv``: its options, those of the process by default."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--scheme", default="int4")
    parser.add_argument("--prompt", type=int, default=3000, help="bytes of both prompts")
    parser.add_argument("--tokens", type=int, default=240, help="bytes to generate")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads; more than one slows so small a model down")
    arguments = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    torch.set_num_threads(arguments.threads)
    started = time.perf_counter()
    model = resolve(str(HERE / "tinylm"), TargetOptions(dtype=dtype, device=device)).model
    place = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {arguments.threads} thread{'s'[: arguments.threads - 1]}"
    console.rule("[bold]tinylm, its KV cache dense and compressed")
    console.print(
        f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, {str(dtype).removeprefix('torch.')}, {place}, torch "
        f"{torch.__version__}; prompts of {arguments.prompt:,} bytes, one token a byte"
    )
    capacity = arguments.prompt + 1 + arguments.tokens + 1
    owner = kvcompile.backend(scheme=arguments.scheme)
    owners = {DENSE: kvcompile.backend(scheme=DENSE), arguments.scheme: owner}
    sides = [Side(STOCK, model, None, capacity)]
    sides += [Side(OURS.format(scheme=scheme), model, own, capacity) for scheme, own in owners.items()]
    source, truth, question, example = prompts(arguments.prompt, arguments.tokens, device)
    for side in sides:
        with doing(f"{side.name}: compile prefill and decode"):
            side.generate(source, 2)

    outcomes = []
    for side in sides:
        with doing(f"{side.name}: write {arguments.tokens} bytes, answer a question, predict real text"):
            outcomes.append(measure(side, source, truth, question, len(example.answer_bytes)))
    live = owner.report()

    console.print("\n[bold]Unseen Python goes on[/] (the prompt's end is dim)")
    texts = [item.run.text for item in outcomes]
    console.print(beside(sides, source, texts))
    shared = f"{common(texts[0], texts[-1])} of {len(texts[0])}"
    console.print(f"{arguments.scheme} writes the first {shared} characters of stock; after one other byte, another text follows.")
    console.print("\n[bold]A needle is found[/]")
    console.print(beside(sides, question, [item.answer.rstrip("\n") for item in outcomes]))
    right = ["right" if item.answer.encode() == example.answer_bytes else "wrong" for item in outcomes]
    console.print(
        f"The note stands {example.depth:.0%} into {arguments.prompt:,} bytes of code and says {example.answer_bytes.decode().strip()}: "
        f"{right[0]} with stock, {right[-1]} with {arguments.scheme}.\n"
    )
    console.print(figures(sides, outcomes))
    console.print(
        f"backend.report(): {size_text(live.dense)} dense before, {size_text(live.allocated)} after ({live.allocated / live.dense:.1%}); "
        f"{live.announced:,} bytes announced, {live.allocated:,} allocated\n"
    )
    console.rule("[bold]what was rewritten (kvcompile explain)")
    console.print(described(owner, tokens=4096))
    console.print(f"[dim]{time.perf_counter() - started:.0f} s in all[/]")


if __name__ == "__main__":
    main()
