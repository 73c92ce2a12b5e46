"""Run the command ``kvcompile`` as ``python -m kvcompile``."""

from kvcompile.tools.cli.main import main

raise SystemExit(main())
