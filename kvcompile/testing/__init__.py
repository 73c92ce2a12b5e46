"""Laws that every scheme must hold, to try on yours: ``conformance(Scheme)``, or ``python -m kvcompile.testing file.py``.

Needs no test framework. Laws that need a separate process, for kernels in Triton's interpreter, are in the repository's tests: ``pytest
--scheme=file.py``.
"""

from kvcompile.errors import LawBroken, NotConforming
from kvcompile.testing.laws import Law
from kvcompile.testing.suite import LAWS, Outcome, conformance, outcomes

__all__ = ["LAWS", "Law", "LawBroken", "NotConforming", "Outcome", "conformance", "outcomes"]
