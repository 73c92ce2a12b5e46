"""kvcompile: a torch.compile backend that rewrites attention over a KV cache into compressed-cache attention.

    model.forward = torch.compile(model.forward, backend=kvcompile.backend(scheme="int4"))
"""

# Imported for what it does: torch.load admits compressed caches from here on.
import kvcompile.runtime.handle.operations  # noqa: F401
from kvcompile.backend import Backend, backend
from kvcompile.errors import KvcompileError
from kvcompile.explain import explain
from kvcompile.extensions.beyond.learning.learn import Learned, learn
from kvcompile.extensions.beyond.learning.settings import LearnSettings
from kvcompile.extensions.beyond.storage import load_tables, save_tables
from kvcompile.extensions.static_scales.checkpoint import read_scales
from kvcompile.extensions.static_scales.measure.calibrate import Calibration, calibrate
from kvcompile.extensions.static_scales.storage import load_scales, save_scales
from kvcompile.passes.plan.policy import Pair, Policy
from kvcompile.report import Report
from kvcompile.runtime.handle.tensor import CompressedCache, decoded
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
from kvcompile.tools.planner.fitting import fit
from kvcompile.types import Granularity

__version__ = "0.1.0"

__all__ = [
    "Backend", "Beyond", "Calibration", "Certified", "Certify", "CompressedCache", "Dense", "Fp8", "Granularity", "Int4", "Int8", "Kivi",
    "KvcompileError", "LearnSettings", "Learned", "Nf4", "Pair", "Policy", "Report", "Scheme", "Squat", "StaticFp8", "StaticInt8",
    "backend", "calibrate", "decoded", "explain", "fit", "learn", "load_scales", "load_tables", "read_scales", "register",
    "require_divides", "save_scales", "save_tables",
]
