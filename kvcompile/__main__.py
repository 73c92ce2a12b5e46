"""``python -m kvcompile`` is the command ``kvcompile``."""

from kvcompile.tools.cli.main import main

raise SystemExit(main())
