"""Left padding that is longer than a prompt's first chunk, in the append kernel of certified planes in Triton's interpreter."""

from __future__ import annotations

import pytest
from interpreted import interpreted
from test_append_padding import compare


@pytest.mark.timeout(600)
def test_the_kernel_begins_a_row_where_its_padding_ends() -> None:
    pytest.importorskip("triton")
    interpreted(compare, "certified", "kvcompile.extensions.certified.append", "append_certified")
