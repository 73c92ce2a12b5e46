"""The one attend template, from its files: the glossary of its symbols stands at the top of ``operands.jinja``.

Rendered by Inductor (``lower``) and, with stand-ins for Inductor's hooks, by ``offline``.
"""

from __future__ import annotations

from kvcompile.lowering.codegen.template_files import joined

LOG2E = 1.4426950408889634

SOURCE = joined(__file__, "operands", "loads", "scores", "values", "kernel")
