"""Highlighting of code on the page: spans with pygments' classes, or escaped text where pygments is missing."""

from __future__ import annotations

import importlib.util

from markupsafe import Markup, escape

LIGHT, DARK = "default", "github-dark"
"""Styles of pygments for light and dark pages."""


def highlighted(code: str) -> Markup:
    """Return Python source as HTML, escaped."""
    if importlib.util.find_spec("pygments") is None:
        return escape(code)
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    # pygments escapes what it highlights.
    return Markup(highlight(code, PythonLexer(), HtmlFormatter(nowrap=True)))


def rules(dark: bool) -> Markup:
    """Return the style rules of highlighted code; "" where pygments is missing."""
    if importlib.util.find_spec("pygments") is None:
        return Markup("")
    from pygments.formatters import HtmlFormatter

    return Markup(HtmlFormatter(style=DARK if dark else LIGHT).get_style_defs(".code"))
