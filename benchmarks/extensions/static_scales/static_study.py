"""Static scales on tinylm: KL and bits per byte beside scales of every token, and what is clipped of text that was not calibrated on.

    python benchmarks/extensions/static_scales/static_study.py --json FILE [--context 600] [--tail 64] [--rows 16] [--windows 32]

Prompts of the shipped held-out text are prefilled into an empty static cache and the true bytes decoded behind them, through the compiled
cache (``kvcompile eval`` does the same), in float32 on a CPU. Scales are calibrated on windows of the same file that no measured row has,
behind a start token. KL is in nats a byte, from the uncompiled model; its interval is of the mean over rows, by 2000 resamplings.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[2] / "examples")]

from tinylm import codec, corpus

import kvcompile
from kvcompile.extensions.static_scales.measure.calibrate import Calibration
from kvcompile.tools.cli.targets import Options, resolve, static_cache

WINDOW = 512
CASES: tuple[tuple[str, str, dict[str, Any]], ...] = tuple(
    (f"{scheme}, per {granularity}{''.join(f', {name} {value:g}' for name, value in more.items())}", scheme,
     {"granularity": granularity, **more})
    for scheme in ("int8", "fp8") for granularity in ("tensor", "head")
    for more in ({}, *([{"percentile": 99.9}, {"margin": 2.0}] if granularity == "head" else []))
)
"""Label, codes, and what ``calibrate`` is told."""


def parts(context: int, tail: int, rows: int, windows: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Rows of tokens to decode, int64 [rows, context + tail + 1], and windows to calibrate on, from what lies between them."""
    text, size = corpus.heldout_text(), context + tail
    stride = len(text) // rows
    room = stride - size
    each = math.ceil(windows / rows)
    if room < each * (WINDOW - 1):
        raise SystemExit(f"between rows there are {room} bytes, and {each} windows of {WINDOW} are needed")
    measured = torch.tensor([codec.encode(text[row * stride :][:size]) for row in range(rows)])
    between = [text[row * stride + size + at * (WINDOW - 1) :][: WINDOW - 1] for row in range(rows) for at in range(each)]
    return measured, [torch.tensor([codec.encode(piece)]) for piece in between[:windows]]


def decoded(model: Any, ids: torch.Tensor, context: int, scheme: object) -> torch.Tensor:
    """Log-probabilities [rows, tail, vocabulary] of what follows the prompts, through the compiled cache."""
    torch.compiler.reset()
    compiled, cache = torch.compile(model, backend=kvcompile.backend(scheme, inner="eager", strict=True)), static_cache(model, ids.shape[1])
    found = []
    with torch.no_grad():
        for start, stop in [(0, context + 1), *((at, at + 1) for at in range(context + 1, ids.shape[1] - 1))]:
            out = compiled(input_ids=ids[:, start:stop].contiguous(), past_key_values=cache, use_cache=True)
            found.append(out.logits[:, -1:].double().log_softmax(-1))
    return torch.cat(found, 1)


def interval(values: list[float]) -> tuple[float, float]:
    """The middle 95% of the means of resampled rows."""
    draw = random.Random(0)
    means = sorted(statistics.fmean(draw.choices(values, k=len(values))) for _ in range(2000))
    return means[50], means[1949]


def row_of(label: str, found: torch.Tensor, reference: torch.Tensor, targets: torch.Tensor) -> dict[str, Any]:
    """The figures of one scheme."""
    kl = (reference.exp() * (reference - found)).sum(-1).mean(1).tolist()
    bits = -float(found.gather(-1, targets[..., None]).mean()) / math.log(2)
    same = float((found.argmax(-1) == reference.argmax(-1)).double().mean())
    return {"scheme": label, "kl": statistics.fmean(kl), "interval": interval(kl), "bits_per_byte": bits, "same": same}


def main() -> int:
    """Measure and print; the JSON file is written after every scheme."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--context", type=int, default=600, help="bytes of a prompt")
    parser.add_argument("--tail", type=int, default=64, help="bytes decoded of each text")
    parser.add_argument("--rows", type=int, default=16, help="texts")
    parser.add_argument("--windows", type=int, default=32, help="windows to calibrate on")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model = resolve(str(HERE.parents[2] / "examples" / "tinylm"), Options(dtype=torch.float32)).model
    ids, windows = parts(arguments.context, arguments.tail, arguments.rows, arguments.windows)
    targets = ids[:, arguments.context + 1 :]
    with torch.no_grad():
        reference = model(input_ids=ids[:, :-1], use_cache=False).logits[:, arguments.context :].double().log_softmax(-1)
    rows, progress = [], Console(stderr=True)
    cases: list[tuple[str, str, dict[str, Any] | None]] = [(name, name, None) for name in ("dense", "int8", "fp8", "fp8-static")]
    for label, name, told in [*cases, *CASES]:
        found: list[Calibration] = []
        scheme: object = name
        if told is not None:
            scheme = kvcompile.calibrate(model, windows, name, validation=[ids], told=found.append, **told)
        row = row_of(label, decoded(model, ids, arguments.context, scheme), reference, targets)
        for made in found:
            row["clipped"] = statistics.fmean(slot.clipped_validation or 0.0 for slot in made.slots)
            row["tokens"] = made.tokens
        rows.append(row)
        clipped = f", {row['clipped']:.4%} clipped" if told is not None else ""
        low, high = row["interval"]
        progress.print(f"{label}: KL {row['kl']:.2e} ({low:.1e} to {high:.1e}), {row['bits_per_byte']:.4f} bits per byte{clipped}")
        if arguments.json:
            content = {"device": "cpu", "torch": torch.__version__, "transformers": transformers.__version__,
                       "options": {name: value for name, value in vars(arguments).items() if name != "json"}, "rows": rows}
            arguments.json.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
