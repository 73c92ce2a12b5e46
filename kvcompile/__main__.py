"""``python -m kvcompile`` is the command ``kvcompile``."""

from kvcompile.cli import main

raise SystemExit(main())
