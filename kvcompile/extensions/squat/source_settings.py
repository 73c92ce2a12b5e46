"""The settings of squat's source, by name: its own for LM-Eval, and those of its LongBench tables (its appendix E.2)."""

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
"""By model and by whether keys are stored before RoPE."""
