"""KL and top-1 of a model under schemes with windows, token by token behind a prompt, beside the uncompressed model; on a CPU.

    python benchmarks/window.py [--model smollm2] [--lengths 1024,4096] [--rows 6] [--tail 64] [--json FILE]
        [--schemes "int4;int4(window=16);int4(window=32);int4(window=64);int4(window=128)"]

The prompt is attended to in full precision, as a call that fills an empty cache does. Each of ``--tail`` tokens then sees codes of all
tokens, or with a window the W tokens before it and itself exactly and codes of older ones, as decode steps do; all steps are one forward
pass, since what a step sees depends on no later one. Codes are the scheme's own ``encode`` and ``decode``. ``--check`` compares this with
compiled caches on a tiny random model. Schemes must encode every token by itself and keep no sinks. Intervals: bootstrap over
predictions; the ratio is of the same predictions, to the first scheme.
"""

from __future__ import annotations

import argparse
import copy
import json
import pathlib
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import kvcompile
from kvcompile import schemes
from kvcompile.schemes import Scheme
from kvcompile.schemes.rotation import rotate, unrotate
from kvcompile.types import Role, SlotSpec

RESAMPLES = 2000


def stored(x_BKTD: torch.Tensor, scheme: Scheme, role: Role) -> torch.Tensor:
    """Return what tokens' codes stand for, in their dtype."""
    half = scheme.for_role(role)
    spec = SlotSpec(x_BKTD.shape[1], x_BKTD.shape[3], x_BKTD.dtype, role)
    assert half.by_token, "one token at a time"
    rotation = half.rotation(spec)
    x = x_BKTD if rotation is None else rotate(x_BKTD, rotation.order, None)
    found = half.decode(half.encode(x), spec).to(x.dtype)
    return found if rotation is None else unrotate(found, rotation.order, None)


class Mixed:
    """Attention of new tokens over codes and exact tokens; ``scheme`` None: all exact."""

    def __init__(self) -> None:
        self.scheme: Scheme | None = None

    def __call__(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        """Return [B, S, H, D] of queries [B, H, S, D] over all keys and values [B, K, T, D] of the cache."""
        del mask
        groups, (new, tokens) = q.shape[1] // k.shape[1], (q.shape[2], k.shape[2])
        if new == tokens:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
            return out.transpose(1, 2), None
        at, t = torch.arange(tokens - new, tokens)[:, None], torch.arange(tokens)
        codes = (k, v) if self.scheme is None else tuple(stored(x, self.scheme, role) for x, role in zip((k, v), Role, strict=True))
        window = 0 if self.scheme is None else self.scheme.window
        exact = (t >= at - window) if window else torch.zeros(new, tokens, dtype=torch.bool)
        wide = [x.repeat_interleave(groups, 1) for x in (k, v, *codes)]
        scores = torch.where(exact, q @ wide[0].mT, q @ wide[2].mT) * scaling
        weights = scores.masked_fill(t > at, float("-inf")).softmax(-1)
        out = (weights * exact) @ wide[1] + (weights * ~exact) @ wide[3]
        return out.transpose(1, 2), None


def prepared(model: Any) -> Mixed:
    """Give a model the attention."""
    from transformers import AttentionInterface

    attention = Mixed()
    AttentionInterface.register("kvcompile_window", attention)
    model.config._attn_implementation = "kvcompile_window"
    return attention


@torch.no_grad()
def logits_of(model: Any, attention: Mixed, ids: torch.Tensor, tail: int, wanted: list[Scheme | None]) -> Iterator[torch.Tensor]:
    """Yield the log-probabilities [rows, tail, vocabulary] behind ``tail`` tokens under each scheme; the prompt is computed once."""
    from transformers import DynamicCache

    filled = []
    for row in ids.split(1):
        cache = DynamicCache(config=model.config)
        model(row[:, :-tail], past_key_values=cache, logits_to_keep=1)
        filled.append(cache)
    for scheme in wanted:
        attention.scheme = scheme
        found = [
            model(row[:, -tail:], past_key_values=copy.deepcopy(cache)).logits.float().log_softmax(-1)
            for row, cache in zip(ids.split(1), filled, strict=True)
        ]
        yield torch.cat(found)


def interval(values: torch.Tensor, over: torch.Tensor | None = None) -> tuple[float, float, float]:
    """Return a mean, or a ratio of means, and its 95% interval by resampling predictions."""
    pick = torch.randint(len(values), (RESAMPLES, len(values)), generator=torch.Generator().manual_seed(0))
    means = values[pick].mean(1) / (1 if over is None else over[pick].mean(1))
    return float(values.mean() / (1 if over is None else over.mean())), *map(float, means.quantile(torch.tensor([0.025, 0.975]).to(means)))


def measure(model: Any, ids: torch.Tensor, tail: int, texts: list[str], kinds: tuple[str, ...]) -> list[dict[str, Any]]:
    """Print and return one row a scheme."""
    found = logits_of(model, prepared(model), ids, tail, [None, *map(schemes.parse, texts)])
    plain, first, rows, length = next(found), None, [], ids.shape[1] - tail
    for text in texts:
        log = next(found)
        each = (plain.exp() * (plain - log)).sum(-1).double()
        kl, same = each.flatten(), (plain.argmax(-1) == log.argmax(-1)).double().flatten()
        first = kl if first is None else first
        by_kind = {kind: float(each[[at for at, of in enumerate(kinds) if of == kind]].mean()) for kind in dict.fromkeys(kinds)}
        layout = [schemes.parse(text).for_role(role).layout(SlotSpec(1, 64, torch.bfloat16, role)) for role in Role]
        held = sum(item.nbytes(-(-length // 64), 1, 1) for item in layout) / (2 * length * 64 * 2)
        rows.append({"scheme": text, "length": length, "kl": interval(kl), "of_first": interval(kl, first), "same": interval(same),
                     "predictions": len(kl), "bytes_of_16_bits_d64": held, "by_kind": by_kind})
        shown = " ".join(f"{name}={', '.join(f'{x:.4f}' for x in rows[-1][name])}" for name in ("kl", "of_first", "same"))
        print(f"{length} {text}: {shown} bytes={held:.3f} {({kind: round(x, 4) for kind, x in by_kind.items()})}", flush=True)
    return rows


def check() -> None:
    """Compare with compiled caches, one token at a time, on a tiny random model."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=64, head_dim=32,
        attn_implementation="sdpa",
    )).eval()
    ids = torch.randint(0, 64, (1, 60))
    for text in ("int4", "int4(window=16)", "int4(rotate=kv,window=16)"):
        model.config._attn_implementation = "sdpa"
        torch.compiler.reset()
        run, cache = torch.compile(model, backend=kvcompile.backend(text, inner="eager", strict=True)), DynamicCache(config=model.config)
        with torch.no_grad():
            run(ids[:, :40], past_key_values=cache)
            product = torch.cat([run(ids[:, at : at + 1], past_key_values=cache).logits for at in range(40, 60)], 1).log_softmax(-1)
        torch.compiler.reset()
        dense, ours = logits_of(model, prepared(model), ids, 20, [None, schemes.parse(text)])
        print(text, "from compiled:", float((ours - product).abs().max()), "from dense:", float((ours - dense).abs().max()), flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--lengths", default="1024,4096")
    parser.add_argument("--rows", type=int, default=6)
    parser.add_argument("--tail", type=int, default=64)
    parser.add_argument("--schemes", default="int4;int4(window=16);int4(window=32);int4(window=64);int4(window=128)")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.check:
        check()
        return
    from kvcompile.tools.cli.subjects import named

    subject, rows = named(options.model, dtype=torch.float32), []
    for length in map(int, options.lengths.split(",")):
        begun, ids = time.time(), torch.as_tensor(subject.texts(length, options.tail, options.rows))
        kinds = subject.kinds(length, options.tail, options.rows)
        rows += measure(subject.model, ids, options.tail, options.schemes.split(";"), tuple(kinds))
        print(f"{length}: {time.time() - begun:.0f} s", flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
