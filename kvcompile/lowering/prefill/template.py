"""The prefill template, from its files; the glossary of its symbols is at the top of ``macros.jinja``.

Rendered by Inductor (``lower``) and by ``offline``.
"""

from __future__ import annotations

from kvcompile.lowering.codegen.template_files import joined

SOURCE = joined(__file__, "macros", "kernel")
