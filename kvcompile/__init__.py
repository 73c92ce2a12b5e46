"""kvcompile: a torch.compile backend that rewrites attention over a KV cache into compressed-cache attention.

    model.forward = torch.compile(model.forward, backend=kvcompile.backend(scheme="int4"))
"""

# Imported for what it does: torch.load admits compressed caches from here on.
import kvcompile.runtime.operations  # noqa: F401
from kvcompile.backend import Backend, backend
from kvcompile.calibration.calibrate import Calibration, calibrate
from kvcompile.errors import KvcompileError
from kvcompile.explain import explain
from kvcompile.learning.learn import Learned, learn
from kvcompile.learning.settings import LearnSettings
from kvcompile.passes.plan.policy import Pair, Policy
from kvcompile.planner.fitting import fit
from kvcompile.report import Report
from kvcompile.runtime.handle import CompressedCache, decoded
from kvcompile.schemes import (
    Beyond,
    Certified,
    Certify,
    Dense,
    Fp8,
    Int4,
    Int8,
    Kivi,
    Nf4,
    Scheme,
    Squat,
    StaticFp8,
    StaticInt8,
    register,
)
from kvcompile.schemes.base import require_divides
from kvcompile.schemes.beyond.storage import load_tables, save_tables
from kvcompile.schemes.calibrated.checkpoint import read_scales
from kvcompile.schemes.calibrated.storage import load_scales, save_scales
from kvcompile.types import Granularity

__version__ = "0.1.0"

__all__ = [
    "Backend", "Beyond", "Calibration", "Certified", "Certify", "CompressedCache", "Dense", "Fp8", "Granularity", "Int4", "Int8", "Kivi",
    "KvcompileError", "LearnSettings", "Learned", "Nf4", "Pair", "Policy", "Report", "Scheme", "Squat", "StaticFp8", "StaticInt8",
    "backend", "calibrate", "decoded", "explain", "fit", "learn", "load_scales", "load_tables", "read_scales", "register",
    "require_divides", "save_scales", "save_tables",
]
