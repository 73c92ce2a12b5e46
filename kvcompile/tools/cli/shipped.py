"""Shipped examples: the demo and the byte-level models, in the checkout's ``examples/`` or in the installed package."""

from __future__ import annotations

from pathlib import Path

from kvcompile.errors import TargetError

CHECKOUT = Path(__file__).resolve().parents[3] / "examples"
INSTALLED = Path(__file__).resolve().parents[2] / "shipped"
"""The folder that setup.py fills when it builds a wheel."""


def examples() -> Path:
    """Return the folder of the examples: the checkout's or, without one, the installed package's.

    Both have tinylm and the demo; only a checkout has other models.
    """
    return CHECKOUT if (CHECKOUT / "tinylm" / "codec.py").is_file() else INSTALLED


def require(folder: Path) -> None:
    """Raise TargetError unless ``folder``, of a shipped model, has its config.json."""
    if not (folder / "config.json").is_file():
        raise TargetError(found=folder.name, why=f"the package does not have it ({folder}); run this in a clone of the repository")
