"""What 2-bit keys do to SmolLM2's predictions, values exact: squat's settings beside kivi, paired by text.

    python benchmarks/extensions/squat/smollm2_keys.py [--schemes 'A;B'] [--offsets 3000,20000] [--grid]

Prompts of 640 tokens of prose, code and a long document (``tools.evaluation.corpus``), one of each kind at each offset, then 96 tokens that
are given. A prompt attends in full precision; a later query reads keys that are at least the window old from codes and newer ones exact,
as a store with a window does. Planes are calibrated by each text's own prompt, by ``Scheme.calibrate`` with its guard. KL in nats a token
from the model without codes, and its ratio to the first scheme's with a 95% interval over texts (bootstrap of pairs, 10,000).
``--grid``: the source's Table 3, lam by directions, on unrotated and rotated keys, in place of ``--schemes``.

Plain torch on one thread: about 40 s for prompts and 15 s a scheme.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import transformers
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvcompile import schemes
from kvcompile.extensions.squat.scheme import Squat
from kvcompile.lowering.ops.operations import apply_rope, undo_rope_body
from kvcompile.schemes.rotation import rotate, unrotate
from kvcompile.tools.cli.packaged import gguf_file
from kvcompile.tools.evaluation.corpus import own_passages
from kvcompile.types import Role, SlotSpec

PROMPT, TAIL = 640, 96
SCHEMES = (
    "kivi;kivi(rotate=k);squat(normalise=True);squat-paper;squat-longbench-llama-3.1-8b;squat;squat(guard=False);squat(subblock=16);"
    "squat(rotate=none);squat(rank=20);kivi(pre_rope=True);squat-pre-paper;squat-pre;squat-pre(queries=distances);"
    "kivi(bits=3,rotate=k);squat(bits=3)"
)


class Study:
    """The model, its prompts' queries, keys and values by layer, and the predictions without codes."""

    def __init__(self, offsets: list[int]) -> None:
        path = gguf_file("smollm2")
        assert path is not None
        read = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
        tokenizer = transformers.AutoTokenizer.from_pretrained(**read)
        self.model = transformers.AutoModelForCausalLM.from_pretrained(**read, dtype=torch.float32).eval()
        rows, self.kinds = [], []
        for passage in own_passages():
            ids = tokenizer(passage.text[:400_000]).input_ids
            for offset in offsets:
                start = min(offset, len(ids) - PROMPT - TAIL - 1)
                rows.append(ids[start : start + PROMPT + TAIL])
                self.kinds.append(passage.kind)
        self.ids, self.seen = torch.tensor(rows), {}
        config = self.model.config
        self.heads, self.dim = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
        self.angles = self.model.model.rotary_emb(torch.zeros(1, 1), torch.arange(PROMPT + TAIL)[None])
        self.scheme: Any = None
        ALL_ATTENTION_FUNCTIONS.register("study", self.attend)
        config._attn_implementation = "study"
        self.tail = False
        self.model(input_ids=self.ids[:, :PROMPT], use_cache=False)
        self.tail = True
        self.exact = self.predictions(None)

    def predictions(self, scheme: str | None) -> torch.Tensor:
        """Log-probabilities of the given tokens' successors, [texts, TAIL, vocabulary]."""
        self.scheme = None if scheme is None else schemes.parse(scheme).for_role(Role.KEY)
        position = torch.arange(PROMPT, PROMPT + TAIL)[None].expand(len(self.ids), -1)
        return self.model(input_ids=self.ids[:, PROMPT:], position_ids=position, use_cache=False).logits.log_softmax(-1)

    def attend(self, module: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: Any, scaling: float, **_: Any) -> Any:
        """Attention of transformers: full precision in the prompt, codes of keys that left the window behind it."""
        del mask
        if not self.tail:
            self.seen[module.layer_idx] = q.clone(), k.clone(), v.clone()
            done = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
            return done.transpose(1, 2), None
        prompt, *before = self.seen[module.layer_idx]
        k, v = torch.cat((before[0], k), 2), torch.cat((before[1], v), 2)
        grouped = q.unflatten(1, (self.heads, -1))
        t, p = torch.arange(PROMPT, k.shape[2])[:, None], torch.arange(k.shape[2])
        scores = grouped @ k[:, :, None].mT
        if self.scheme is not None:
            coded = grouped @ self.coded(prompt.unflatten(1, (self.heads, -1)), k)[:, :, None].mT
            scores = torch.where(p < t - self.scheme.window, coded, scores)
        weights = (scores * scaling).masked_fill(p > t, float("-inf")).softmax(-1)
        return (weights @ v[:, :, None]).flatten(1, 2).transpose(1, 2), None

    def coded(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        """Keys as a store of the scheme returns them, calibrated by queries q [B, K, G, S, D] of the prompt."""
        scheme, slot = self.scheme, SlotSpec(self.heads, self.dim, torch.float32, Role.KEY)
        rotation, whole = scheme.rotation(slot), k.shape[2] // 32 * 32
        cos, sin = (table[:, : k.shape[2]] for table in self.angles)
        if scheme.pre_rope:
            k = undo_rope_body(k, cos, sin, False)
        if rotation is not None:
            k, q = rotate(k, rotation.order, None), rotate(q.flatten(1, 2), rotation.order, None).unflatten(1, q.shape[1:3])
        fixed: tuple[torch.Tensor, ...] = ()
        if scheme.calibrates(slot):
            angles = None
            if scheme.calibrates_before_rope:
                angles = cos[:, :PROMPT], sin[:, :PROMPT], False
                q = undo_rope_body(q.flatten(1, 2), *angles).unflatten(1, q.shape[1:3])
            fixed = self.planes(q, schemes.Prompt(k[:, :, :PROMPT], angles))
        made = k.clone()
        made[:, :, :whole] = scheme.decode(scheme.encode(k[:, :, :whole], *fixed), slot)
        if rotation is not None:
            made = unrotate(made, rotation.order, None)
        return apply_rope(made, cos, sin, False) if scheme.pre_rope else made

    def planes(self, q: torch.Tensor, prompt: schemes.Prompt) -> tuple[torch.Tensor, ...]:
        """The calibrated planes, of each text for itself: [1, B, K, D, D]."""
        assert prompt.keys is not None
        rows = [
            self.scheme.calibrate(q[row : row + 1], None, schemes.Prompt(prompt.keys[row : row + 1], prompt.angles))
            for row in range(len(q))
        ]
        return tuple(torch.cat(planes, 1) for planes in zip(*rows, strict=True))

    def kl(self, scheme: str) -> tuple[torch.Tensor, float]:
        """KL of each text, and the share of equal first choices."""
        found = self.predictions(scheme)
        kl = (self.exact.exp() * (self.exact - found)).sum(-1).mean(-1)
        return kl, float((self.exact.argmax(-1) == found.argmax(-1)).float().mean())


def interval(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[float, float]:
    """95% of the ratios of means over texts drawn in pairs."""
    drawn = torch.randint(len(ours), (10_000, len(ours)), generator=torch.Generator().manual_seed(0))
    ratios = (ours[drawn].mean(1) / theirs[drawn].mean(1)).sort().values
    return float(ratios[249]), float(ratios[9749])


def main() -> None:
    """Print one line a scheme."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument("--offsets", default="3000,20000")
    parser.add_argument("--grid", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    spelled = options.schemes.split(";")
    if options.grid:
        # The source's half of a head at a time; its own form, without a unit.
        cells = [(rank, lam) for rank in (5, 20, 60) for lam in (1e-4, 1e-3, 1e-2)]
        spelled = ["kivi", "kivi(rotate=k)"] + [
            Squat.paper(rank=rank, lam=lam, subblock=32, rotate=turned).spec()
            for turned in (schemes.parse("kivi").rotate, Squat().rotate) for rank, lam in cells
        ]
    with torch.no_grad():
        study = Study([int(text) for text in options.offsets.split(",")])
        first = None
        for scheme in spelled:
            begun = time.perf_counter()
            kl, same = study.kl(scheme)
            first = kl if first is None else first
            by_kind = " ".join(
                f"{kind} {kl[[at for at, own in enumerate(study.kinds) if own == kind]].mean():.4f}" for kind in dict.fromkeys(study.kinds)
            )
            low, high = interval(kl, first)
            better = int((kl < first).sum())
            print(
                f"{scheme}: KL {kl.mean():.4f} ({by_kind}), {kl.mean() / first.mean():.3f} ({low:.3f} to {high:.3f}) of the first's, "
                f"better on {better} of {len(kl)}, first choice {same:.3f}; {time.perf_counter() - begun:.0f} s",
                flush=True,
            )


if __name__ == "__main__":
    main()
