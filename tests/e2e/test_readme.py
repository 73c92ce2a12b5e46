"""README's "Ten lines", run as they stand on a tiny checkpoint."""

from __future__ import annotations

import pytest
import torch

from benchmarks.accept.ten_lines import check, example, execute


def test_the_example_is_no_longer_than_it_says() -> None:
    assert 5 <= len([line for line in example().splitlines() if line.strip()]) <= 10
    assert 'mode="reduce-overhead"' in example("reduce-overhead")
    assert (".cuda()" in example()) == torch.cuda.is_available()


@pytest.mark.compile
@pytest.mark.parametrize("mode", [None, "reduce-overhead"], ids=["default", "reduce-overhead"])
def test_ten_lines(mode: str | None, one_thread: None, fresh_dynamo: None) -> None:
    check(execute(mode))
