"""Options of the squat scheme as SQuat's paper sets them: for LM-Eval (``PAPER``), and for LongBench by model (its appendix E.2)."""

from __future__ import annotations

from typing import Any

PAPER: dict[str, Any] = {"lam": 1e-3, "rank": 5, "subblock": 64}

LONGBENCH: dict[tuple[str, bool], dict[str, Any]] = {
    ("llama-2-7b", False): {"rank": 40, "lam": 1e-3, "subblock": 64},
    ("llama-2-7b", True): {"rank": 5, "lam": 1e-3, "subblock": 32},
    ("llama-3.1-8b", False): {"rank": 10, "lam": 5e-4, "subblock": 64},
    ("llama-3.1-8b", True): {"rank": 60, "lam": 5e-4, "subblock": 32},
    ("mistral-7b", False): {"rank": 5, "lam": 1e-3, "subblock": 64},
    ("mistral-7b", True): {"rank": 20, "lam": 5e-4, "subblock": 64},
}
"""Options for LongBench by (model, pre_rope); ``pre_rope``: True where keys are stored before RoPE."""
