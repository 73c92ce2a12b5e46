"""A first look at smartkv's settings: tinylm decodes uncompiled over a cache whose tokens have the widths that its allocator gives them.

``python benchmarks/extensions/smartkv/smartkv_study.py --context 600 --tail 96``. Each step attends over what the codes decode to, as a
store of that scheme would give it back; importance comes from the attention weights of that very step. Keys and values that stay 8 bits
wide between two allocations, as new tokens do, count. Promotions read the originals (tier 2). It measures choices, not a product: nothing
is compiled.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from kvcompile import schemes
from kvcompile.extensions.smartkv import codes
from kvcompile.extensions.smartkv.allocation import LevelPreference, allocate, spendable, spent
from kvcompile.extensions.smartkv.budget import Cost, KeyValueWidths
from kvcompile.extensions.smartkv.importance import (
    Measure,
    across_layers,
    averaged,
    blended,
    head_measure,
    head_weights,
    token_mass,
    weighted_by_recency,
)
from kvcompile.tools.cli import quality
from kvcompile.types import Role, SlotSpec

PROTECTED, EVERY = 4, 32
Tensor = torch.Tensor


@dataclass
class Fixed:
    """A scheme that ``schemes.parse`` knows, whose codes depend on their own token alone."""

    spelled: str
    slot: SlotSpec

    def fill(self, attention: list[Tensor]) -> None:
        """Nothing depends on attention."""

    def after(self, attention: list[Tensor]) -> None:
        """Nothing depends on attention."""

    def stored(self, layer: int, x: Tensor, role: Role) -> Tensor:
        """Return the tokens ``x`` [B, K, T, D] of a layer as their codes decode."""
        scheme, slot = schemes.parse(self.spelled).for_role(role), replace(self.slot, role=role)
        return scheme.decode(scheme.encode(x), slot).to(x.dtype)

    def share(self) -> float:
        """The most of 16-bit bytes that it took."""
        return sum(schemes.parse(self.spelled).for_role(role).bits_per_value(replace(self.slot, role=role)) for role in Role) / 32


@dataclass
class Adaptive:
    """smartkv with some settings; one layer's importance for itself, or the mean of all layers' for all."""

    budget: float
    cost: Cost
    halves: KeyValueWidths = field(default_factory=lambda: KeyValueWidths((3, 4, 8), (2, 3, 4, 8)))
    preference: LevelPreference = field(default_factory=LevelPreference)
    aggregated: bool = False
    temperature: float = 512.0
    head_share: float = 0.3
    decay: float = 0.9
    importance: list[Tensor] = field(default_factory=list)
    widths: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    most: float = 0.0

    def fill(self, attention: list[Tensor]) -> None:
        """Begin with what a prompt's queries attended to: each token's mean over the queries that see it."""
        tokens = attention[0].shape[-1]
        seen = torch.arange(tokens, 0, -1)
        self.importance = [self._mixed(each.sum(2) / seen, each.amax(-1).mean(-1)) for each in attention]
        self._allocate()

    def _mixed(self, weights_RHT: Tensor, measure_RH: Tensor) -> Tensor:
        return blended(token_mass(weights_RHT), token_mass(weights_RHT, head_weights(measure_RH)), self.head_share)

    def _allocate(self) -> None:
        rows, tokens = self.importance[0].shape
        spend = torch.full((rows,), spendable(self.budget, tokens, EVERY, self.cost, self.halves))
        age, protected = tokens - 1 - torch.arange(tokens).expand(rows, -1), (torch.arange(tokens) < PROTECTED).expand(rows, -1)
        given = [across_layers(torch.stack(self.importance))] * len(self.importance) if self.aggregated else self.importance
        if self.temperature:
            given = [weighted_by_recency(each, age, self.temperature) for each in given]
        found = [allocate(each, spend, self.cost, self.halves, self.preference, protected_RT=protected) for each in given]
        self.widths = [(each.keys, each.values) for each in found]

    def after(self, attention: list[Tensor]) -> None:
        """Take one step's weights into the averages; allocate where it is time."""
        for layer, each in enumerate(attention):
            weights = each[:, :, -1]
            now = self._mixed(weights, head_measure(weights, Measure.PEAK))
            grown = now.shape[-1] - self.importance[layer].shape[-1]
            self.importance[layer] = averaged(torch.nn.functional.pad(self.importance[layer], (0, grown)), now, self.decay)
            keys, values = (torch.nn.functional.pad(item, (0, grown), value=8) for item in self.widths[layer])
            self.widths[layer] = keys, values
        tokens = self.widths[0][0].shape[-1]
        total = sum(float(spent(*each, self.cost).float().mean()) for each in self.widths)
        self.most = max(self.most, total / len(self.widths) / tokens / self.cost.dense)
        if tokens % EVERY == 0:
            self._allocate()

    def stored(self, layer: int, x: Tensor, role: Role) -> Tensor:
        """Return the tokens ``x`` [B, K, T, D] of a layer as their codes decode."""
        widths = self.widths[layer][role is Role.VALUE][:, None, :, None]
        used = [bits for bits in codes.WIDTHS if bool((widths == bits).any())]
        parts = [torch.where(widths == bits, codes.decode(codes.encode(x, bits), bits), 0) for bits in used]
        return torch.stack(parts).sum(0)

    def share(self) -> float:
        """The most of 16-bit bytes that it took at any step."""
        return self.most


def decoded(bench: Any, store: Fixed | Adaptive) -> dict[str, float]:
    """Bits per byte, KL from the uncompressed model in nats, share of equal next bytes, and bytes over those of 16 bits."""
    model, ids, start = bench.model, bench.ids, bench.effort.context + 1
    cache, found = transformers.DynamicCache(config=model.config), []
    with torch.no_grad():
        out = model(input_ids=ids[:, :start], past_key_values=cache, use_cache=True, output_attentions=True)
        originals = [[layer.keys, layer.values] for layer in cache.layers]
        store.fill(list(out.attentions))
        for at in range(start, ids.shape[1]):
            found.append(out.logits[:, -1:].float().log_softmax(-1))
            if at == ids.shape[1] - 1:
                break
            for number, layer in enumerate(cache.layers):
                layer.keys, layer.values = (store.stored(number, x, role) for x, role in zip(originals[number], Role, strict=True))
            out = model(input_ids=ids[:, at : at + 1].contiguous(), past_key_values=cache, use_cache=True, output_attentions=True)
            for held, layer in zip(originals, cache.layers, strict=True):
                held[:] = [torch.cat([old, new[:, :, -1:]], 2) for old, new in zip(held, (layer.keys, layer.values), strict=True)]
            store.after(list(out.attentions))
    logits = torch.cat(found, 1)
    kl = torch.nn.functional.kl_div(logits, bench.reference, log_target=True, reduction="sum") / (logits.shape[0] * logits.shape[1])
    same = (logits.argmax(-1) == bench.reference.argmax(-1)).float().mean()
    return {"bits per byte": bench._bits(logits), "KL": float(kl), "same": float(same), "bytes": store.share()}


def subjects(cost: Cost, slot: SlotSpec, budgets: list[float]) -> dict[str, Fixed | Adaptive]:
    """Stores by name: fixed schemes, and smartkv by budget and by what is changed."""
    found: dict[str, Fixed | Adaptive] = {name: Fixed(name, slot) for name in ("int8", "int4", "int4(granularity=token)", "nf4")}
    # What of it is the width of the newest tokens alone?
    for keys, values in ((3, 3), (4, 3), (4, 4)):
        found[f"keys of {keys}, values of {values} bits, the newest of 8"] = Adaptive(0.5, cost, KeyValueWidths((keys,), (values,)))
    for budget in budgets:
        for keys in ((2, 3, 4, 8), (3, 4, 8), (4, 8)):
            halves = KeyValueWidths(keys, codes.WIDTHS)
            if budget >= cost.least(halves) + 0.005:
                found[f"budget {budget}, keys {keys}"] = Adaptive(budget, cost, halves)
    changes: dict[str, dict[str, Any]] = {
        "one importance for all layers": {"aggregated": True}, "no recency": {"temperature": 0.0}, "no head weights": {"head_share": 0.0},
        "alpha 0.3": {"taste": LevelPreference(0.3)}, "alpha 0.8": {"taste": LevelPreference(0.8)},
        "keys count twice": {"taste": LevelPreference(keys=2.0)},
    }
    finer = KeyValueWidths((4, 8), codes.WIDTHS)
    return found | {f"budget 0.28, keys (4, 8), {name}": Adaptive(0.28, cost, finer, **change) for name, change in changes.items()}


def main() -> None:
    """Measure all stores and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--context", type=int, default=600)
    parser.add_argument("--tail", type=int, default=96)
    parser.add_argument("--budgets", default="0.22,0.25,0.28,0.35")
    parser.add_argument("--only", default="", help="the stores whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    bench = quality.Bench(replace(quality.QUICK, context=options.context, tail=options.tail, batch=4, questions=1))
    bench.model.set_attn_implementation("eager")
    config = bench.model.config
    dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    cost, slot = Cost(config.num_key_value_heads, dim), SlotSpec(config.num_key_value_heads, dim, torch.float32, Role.KEY)
    rows = []
    for name, store in subjects(cost, slot, [float(item) for item in options.budgets.split(",")]).items():
        if options.only in name:
            started = time.perf_counter()
            rows.append({"store": name, **decoded(bench, store), "seconds": time.perf_counter() - started})
            if options.json:
                options.json.write_text(json.dumps(rows, indent=1))
    table = Table("store", "bits per byte", "KL", "same", "bytes")
    for row in rows:
        table.add_row(row["store"], *(f"{row[name]:.4f}" for name in ("bits per byte", "KL", "same", "bytes")))
    Console(width=120).print(table, f"uncompressed: {bench.reference_bits():.4f} bits per byte")


if __name__ == "__main__":
    main()
