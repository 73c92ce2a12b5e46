"""Build: the wheel also carries the demo and tinylm, which stand in ``examples/`` in the repository; all else is in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

SHIPPED = "kvcompile/shipped"
EXAMPLES = (
    "demo.py", "tinylm/__init__.py", "tinylm/LICENSE.md", "tinylm/codec.py", "tinylm/config.json", "tinylm/corpus.py",
    "tinylm/generation_config.json", "tinylm/heldout.py.txt", "tinylm/model.safetensors", "tinylm/tasks.py",
)
"""What a command reads of ``examples/``; an editable installation reads it there."""


class BuildWithExamples(build_py):
    """The usual build of modules, and copies of ``EXAMPLES`` in ``SHIPPED``."""

    def run(self) -> None:
        """Build the modules, then copy."""
        super().run()
        if not self.editable_mode:
            for name, target in zip(EXAMPLES, self._targets(), strict=True):
                self.mkpath(str(Path(target).parent))
                self.copy_file(f"examples/{name}", target, preserve_mode=False)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        """Return every file of the build."""
        return [*super().get_outputs(include_bytecode), *([] if self.editable_mode else self._targets())]

    def _targets(self) -> list[str]:
        return [str(Path(self.build_lib) / SHIPPED / name) for name in EXAMPLES]


setup(cmdclass={"build_py": BuildWithExamples})
