"""``python -m kvcompile`` is the command ``kvcompile``."""

from kvcompile.tools.cli import main

raise SystemExit(main())
