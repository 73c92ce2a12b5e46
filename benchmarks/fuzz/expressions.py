"""Expressions: the Python text that a program's attention may be spelled with, by feature and value, the plain value first.

Names in the texts: ``q`` [B, H, n, D], ``keys`` and ``values`` [B, H, T, D], ``p`` [n, 1] or [B, 1, n, 1] positions of queries, ``t`` [T]
positions of keys, ``seen`` bool [.., n, T], ``s`` [B, H, n, T] scores, ``h`` masked scores, ``w`` weights, ``start`` the first position as
a Python int, ``n`` new tokens, ``T`` keys. ``DEVICE`` stands for the device argument of a factory, which is empty on a CPU.
"""

from __future__ import annotations

HEADS, DIM, CAPACITY, BATCH = 4, 16, 48, 2
LONG, RING, BLOCK, ENCODED = 320, 8, 8, 9
"""Capacity of long programs, places of a ring, places of a block of a pool, tokens of a cross cache."""

MASKS = {
    "causal": "t <= p",
    "window": "(t <= p) & (t > p - 4)",
    "window-float": "(t <= p) & (t > p - 4.5)",
    "lt-float": "t < p + 0.5",
    "every-second": "(t <= p) & (t % 2 == 0)",
    "not-the-third": "(t <= p) & (t != 2)",
    "prefix": "(t <= p) | (t < 2)",
    "blocks": "(t // 4 == p // 4) & (t <= p)",
    "blind": "(t <= p) & (t > 1)",
    "strict": "t < p",
    "ahead": "t <= p + 1",
    "int-not": "(~(t <= p).int() + 2).bool()",
    "half-steps": "torch.arange(0.5, T, DEVICE) <= p",
    "furthest": "(t <= p.max()) & (p >= 0)",
    "negated": "~(t > p)",
    "difference": "p - t >= 0",
}
"""Which keys each query sees, from positions."""

COUNTED = {
    "tril-diagonal": "torch.ones(n, T, dtype=torch.bool, DEVICE).tril(start)",
    "triu": "~torch.ones(n, T, dtype=torch.bool, DEVICE).triu(start + 1)",
    "triu-inf": "torch.full((n, T), -torch.inf, DEVICE).triu(start + 1) == 0",
    "buffer-slice": "self.causal[start : start + n, :T]",
    "buffer-narrow": "self.causal.narrow(0, start, n)[:, :T]",
    "int-limit": "t < start + torch.arange(1, n + 1, DEVICE)[:, None]",
}
"""Masks made of a Python ``start``, over as many keys as there are."""

TAILS = {
    "tril-tail": "torch.ones(T, T, dtype=torch.bool, DEVICE).tril()[-n:]",
    "tril-window-tail": "torch.ones(T, T, dtype=torch.bool, DEVICE).tril().triu(-3)[-n:]",
    "tril-narrow": "torch.ones(T, T, dtype=torch.bool, DEVICE).tril().narrow(0, T - n, n)",
    "tril-from": "torch.ones(T, T, dtype=torch.bool, DEVICE).tril()[start:]",
    "tril-flipped": "torch.ones(T, T, dtype=torch.bool, DEVICE).tril().flip(0)[:n].flip(0)",
    "tril-split": "torch.ones(T, T, dtype=torch.bool, DEVICE).tril().split([start, n])[1]",
    "triu-tail": "torch.full((T, T), -torch.inf, DEVICE).triu(1)[-n:] == 0",
    "arange-tail": "t <= torch.arange(T, DEVICE)[-n:, None]",
    "buffer-tail": "self.causal[:T, :T][-n:]",
    "zeros-and-triangle": (
        "torch.cat([torch.ones(n, start, dtype=torch.bool, DEVICE), torch.ones(n, n, dtype=torch.bool, DEVICE).tril()], 1)"
    ),
    "zeros-and-infinity": (
        "torch.cat([torch.zeros(n, start, DEVICE), torch.full((n, n), -torch.inf, DEVICE).triu(1)], 1) == 0"
    ),
    "full": "torch.full((n, T), True, DEVICE)",
}
"""Masks of the last rows of what is as long as ``start + n``: they need a cache that is read up to there."""

HIDDEN = {
    "fill": "s.masked_fill(~seen, -torch.inf)",
    "where": "torch.where(seen, s, -torch.inf)",
    "add": "s + torch.where(seen, 0.0, -torch.inf).to(s.dtype)",
    "lowest": "s.masked_fill(~seen, torch.finfo(s.dtype).min)",
    "add-lowest": "s + torch.where(seen, 0.0, torch.finfo(s.dtype).min).to(s.dtype)",
    "minus-large": "s - (~seen).to(s.dtype) * 1e9",
    "ten-thousand": "s.masked_fill(~seen, -1e4)",
    "small": "s.masked_fill(~seen, -6.0)",
    "times": "s * seen",
    "none": "s",
    "then-cooled": "s.masked_fill(~seen, -1e4) / 2000",
    "lowest-half": "s.masked_fill(~seen, torch.finfo(torch.float16).min)",
    "lowest-brain": "s.masked_fill(~seen, torch.finfo(torch.bfloat16).min)",
    "add-lowest-half": "s + torch.where(seen, 0.0, -65504.0).to(s.dtype)",
    "add-ten-thousand": "s + (1.0 - seen.to(s.dtype)) * -1e4",
    "moved-down": "s + torch.where(seen, -2e4, -1e9).to(s.dtype)",
    "moved-up": "s + torch.where(seen, 1e5, -1e9).to(s.dtype)",
    "floor-ten-thousand": "torch.where(seen, s, -torch.inf).clamp(min=-1e4)",
    "seen-brain": "s + (1.0 - seen.to(torch.bfloat16)).to(s.dtype) * torch.finfo(s.dtype).min",
}
"""How keys that a query does not see are taken out of its scores."""

SCORES = {
    "plain": "s",
    "cap": "torch.tanh(s / 5) * 5",
    "cap-uneven": "torch.tanh(s / 5) * 3",
    "cap-negative": "torch.tanh(s / 5) * -5",
    "cap-biased": "(torch.tanh(s / 5) - (p - t).abs() * 0.01) * 5",
    "alibi": "s - (p - t).abs() * 0.1",
    "alibi-heads": "s - (p - t).abs() * torch.arange(1, 5, DEVICE)[:, None, None] * 0.05",
    "alibi-from-end": "s + (t - 48) * torch.arange(1, 5, DEVICE)[:, None, None] * 0.05",
    "alibi-steep": "s + (t - 48) * 500.0",
    "negative": "-s",
    "twice": "s * 2",
    "temperature": "s * torch.log(p + 2.0).to(s.dtype)",
    "floor": "s.floor()",
    "clamp": "s.clamp(-1, 1)",
    "clamp-far": "s.clamp(min=-1e4) * 1e-3",
    "clamp-half": "s.half().clamp(-6e4, 6e4).to(s.dtype)",
    "relu": "s.relu()",
    "int": "s.int().to(s.dtype)",
    "float8": "s.to(torch.float8_e4m3fn).to(s.dtype)",
    "half": "s.half().to(s.dtype)",
    "brain": "s.bfloat16().to(s.dtype)",
    "float64": "s.double().to(s.dtype)",
    "less-mean": "s - s.mean(-1, keepdim=True)",
    "less-head-maximum": "s - s.amax(1, keepdim=True)",
    "less-maximum": "s - s.amax(-1, keepdim=True)",
}
"""What becomes of scores before masks."""

SOFTMAX = {
    "softmax": "h.softmax(-1)",
    "float32": "h.float().softmax(-1).to(h.dtype)",
    "by-hand": "(e := (h - h.amax(-1, keepdim=True)).exp()) / e.sum(-1, keepdim=True)",
    "log": "h.log_softmax(-1).exp()",
    "plus-one": "(e := h.exp()) / (e.sum(-1, keepdim=True) + 1.0)",
    "two": "(e := torch.exp2(h - h.amax(-1, keepdim=True))) / e.sum(-1, keepdim=True)",
    "sigmoid": "h.sigmoid()",
    "no-nan": "h.softmax(-1).nan_to_num(0.0)",
    "hidden-zero": "h.softmax(-1).masked_fill(~seen, 0.0)",
    "where-any": "torch.where(seen.any(-1, keepdim=True), h.softmax(-1), 0.0)",
    "where-finite": "torch.where((h == -torch.inf).all(-1, keepdim=True), torch.zeros_like(h), h.softmax(-1))",
    "epsilon": "(e := (h - h.amax(-1, keepdim=True)).exp()) / (e.sum(-1, keepdim=True) + 1e-9)",
    "differential": "h.softmax(-1) - 0.4 * (h * 0.5).softmax(-1)",
    "sinks": "torch.cat([h, self.sinks.to(h.dtype).expand(h.shape[0], -1, n, 1)], -1).softmax(-1)[..., :-1]",
}
"""How masked scores become weights."""

WEIGHTS = {
    "plain": "w",
    "float8": "w.to(torch.float8_e4m3fn).to(w.dtype)",
    "halved": "w * 0.5",
    "clamped": "w.clamp(min=0.02)",
    "mixed": 'torch.einsum("bhst,hg->bgst", w, torch.eye(4, dtype=w.dtype, DEVICE) + 0.2)',
}
"""What becomes of weights."""

READ = {
    "plain": "x",
    "contiguous": "x.contiguous()",
    "float8": "x.to(torch.float8_e4m3fn).to(x.dtype)",
    "scaled": "x * 0.5",
    "shifted": "x + 0.25",
    "rolled-heads": "x.roll(1, 1)",
    "clamped": "x.clamp(-0.5, 0.5)",
}
"""What becomes of keys or values behind the cache."""

CASTS = {
    "none": "x",
    "brain": "x.to(torch.bfloat16)",
    "half": "x.to(torch.float16)",
    "int32": "x.to(torch.int32)",
    "int16": "x.to(torch.int16)",
    "float32": "x.float()",
    "to-int8": "x.to(torch.int8)",
}
"""The dtype in which positions of queries and keys are compared."""
