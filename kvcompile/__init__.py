"""kvcompile: a torch.compile backend that rewrites attention over a KV cache into compressed-cache attention.

    model.forward = torch.compile(model.forward, backend=kvcompile.backend(scheme="int4"))
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Backend", "Beyond", "Calibration", "Certified", "Certify", "CompressedCache", "Dense", "Fp8", "Granularity", "Int4", "Int8", "Kivi",
    "KvcompileError", "LearnSettings", "Learned", "Nf4", "Pair", "Policy", "Pool", "Report", "Scheme", "Squat", "StaticFp8", "StaticInt8",
    "backend", "calibrate", "decoded", "explain", "fit", "fork", "learn", "load_cache", "load_scales", "load_tables", "named_backends",
    "pool", "read_scales", "register", "require_divides", "save_cache", "save_scales", "save_tables",
]

if TYPE_CHECKING:
    from kvcompile.backend import Backend, backend
    from kvcompile.dynamo_entry import named_backends
    from kvcompile.errors import KvcompileError
    from kvcompile.explain import explain
    from kvcompile.extensions.beyond.learning.learn import Learned, learn
    from kvcompile.extensions.beyond.learning.settings import LearnSettings
    from kvcompile.extensions.beyond.scheme import Beyond
    from kvcompile.extensions.beyond.storage import load_tables, save_tables
    from kvcompile.extensions.certified.scheme import Certified
    from kvcompile.extensions.squat.scheme import Squat
    from kvcompile.extensions.static_scales.checkpoint import read_scales
    from kvcompile.extensions.static_scales.measure.calibrate import Calibration, calibrate
    from kvcompile.extensions.static_scales.scheme import StaticFp8, StaticInt8
    from kvcompile.extensions.static_scales.storage import load_scales, save_scales
    from kvcompile.passes.plan.policy import Pair, Policy
    from kvcompile.persistence.cache_file import load_cache, save_cache
    from kvcompile.persistence.fork import fork
    from kvcompile.report import Report
    from kvcompile.runtime.handle.tensor import CompressedCache, decoded
    from kvcompile.schemes import Certify, Dense, Fp8, Int4, Int8, Kivi, Nf4, Scheme, register
    from kvcompile.schemes.base import require_divides
    from kvcompile.serving.pools import Pool, pool
    from kvcompile.tools.planner.fitting import fit
    from kvcompile.types import Granularity

_PLACES = {
    "kvcompile.backend": ("Backend", "backend"),
    "kvcompile.dynamo_entry": ("named_backends",),
    "kvcompile.errors": ("KvcompileError",),
    "kvcompile.explain": ("explain",),
    "kvcompile.extensions.beyond.learning.learn": ("Learned", "learn"),
    "kvcompile.extensions.beyond.learning.settings": ("LearnSettings",),
    "kvcompile.extensions.beyond.scheme": ("Beyond",),
    "kvcompile.extensions.beyond.storage": ("load_tables", "save_tables"),
    "kvcompile.extensions.certified.scheme": ("Certified",),
    "kvcompile.extensions.squat.scheme": ("Squat",),
    "kvcompile.extensions.static_scales.checkpoint": ("read_scales",),
    "kvcompile.extensions.static_scales.measure.calibrate": ("Calibration", "calibrate"),
    "kvcompile.extensions.static_scales.scheme": ("StaticFp8", "StaticInt8"),
    "kvcompile.extensions.static_scales.storage": ("load_scales", "save_scales"),
    "kvcompile.passes.plan.policy": ("Pair", "Policy"),
    "kvcompile.persistence.cache_file": ("load_cache", "save_cache"),
    "kvcompile.persistence.fork": ("fork",),
    "kvcompile.report": ("Report",),
    "kvcompile.runtime.handle.tensor": ("CompressedCache", "decoded"),
    "kvcompile.schemes": ("Certify", "Dense", "Fp8", "Int4", "Int8", "Kivi", "Nf4", "Scheme", "register"),
    "kvcompile.schemes.base": ("require_divides",),
    "kvcompile.serving.pools": ("Pool", "pool"),
    "kvcompile.tools.planner.fitting": ("fit",),
    "kvcompile.types": ("Granularity",),
}
"""Public names by the module that defines them; a module is imported when one of its names is first asked for."""
_MODULES = {name: module for module, names in _PLACES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        found = getattr(importlib.import_module(_MODULES[name]), name)
    elif not name.startswith("_") and importlib.util.find_spec(f"{__name__}.{name}") is not None:
        found = importlib.import_module(f"{__name__}.{name}")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    setattr(sys.modules[__name__], name, found)
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Face(ModuleType):
    """The class of the module ``kvcompile``.

    ``kvcompile.backend`` and ``kvcompile.explain`` stay functions after the submodules of these names are imported.
    """

    def __setattr__(self, name: str, value: object) -> None:
        if isinstance(value, ModuleType) and _MODULES.get(name) == value.__name__:
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face

# From here on torch.load reads compressed caches. The command line (``kvcompile``, ``python -m kvcompile``) skips this import: it loads no
# cache before it has parsed its options, and answers --help and wrong options without importing torch.
if Path(sys.argv[0] if sys.argv else "").name not in {"kvcompile", "kvcompile.exe", "-m"}:
    import kvcompile.files.pickled  # noqa: F401
