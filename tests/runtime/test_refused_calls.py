"""Calls that a compressed cache refuses before it has written anything: the dense cache serves them, with one warning, or they raise."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import kvcompile
from kvcompile import errors

HEADS, DIM, CAPACITY = 2, 32, 96
Tensor = torch.Tensor
SCHEMES = ("dense", "int8", "kivi(bits=4)", "int8(window=16)", "squat(bits=4,rotate=none)", "certified", "smartkv(budget=1.0)")
CLOSE = {"dense": 1e-5, "int8": 0.03, "certified": 1e-5, "smartkv(budget=1.0)": 0.03}


class Cached(torch.nn.Module):
    """Attention over two buffers, keys and values written where the caller says; either may be taken for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("keys", torch.zeros(1, HEADS, CAPACITY, DIM))
        self.register_buffer("values", torch.zeros(1, HEADS, CAPACITY, DIM))

    def forward(self, qkv: Tensor, places: Tensor, value_places: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        q, k, v = qkv
        keys[:, :, places] = k
        values[:, :, value_places] = v
        hidden = torch.arange(CAPACITY) > (places % CAPACITY)[:, None]
        return ((q @ keys.mT) / DIM**0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ values


class Pair:
    """A module and the same one compiled, which take the same calls."""

    def __init__(self, scheme: str, strict: bool = False) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.plain, self.module = Cached(), Cached()
        self.compiled = torch.compile(self.module, backend=kvcompile.backend(scheme, inner="eager", strict=strict))
        self.close = CLOSE.get(scheme, 0.3)

    @property
    def compressed(self) -> bool:
        """Whether both caches are compressed."""
        return all(isinstance(cache, kvcompile.CompressedCache) for cache in self.module.buffers())

    def __call__(self, first: int, count: int = 1, shift: int = 0, behind: int = 0, swapped: bool = False) -> None:
        """Write ``count`` tokens from place ``first`` on, moved by ``shift``, values ``behind`` their keys; compare what comes out."""
        qkv = torch.randn(3, 1, HEADS, count, DIM)
        places = torch.arange(first, first + count) + shift
        outputs = []
        for call, module in ((self.plain, self.plain), (self.compiled, self.module)):
            caches = (module.values, module.keys) if swapped else (module.keys, module.values)
            outputs.append(call(qkv, places, places - behind, *caches))
        assert (outputs[0] - outputs[1]).abs().max() <= self.close * outputs[0].abs().max()

    def both(self, change: Callable[[Cached], Any]) -> list[Any]:
        """Do something to both modules."""
        return [change(self.plain), change(self.module)]


def _negative(pair: Pair) -> Iterator[None]:
    pair(0, 40)
    pair(40)
    for place in range(41, 44):
        yield pair(place, shift=-CAPACITY)


def _negative_from_the_first(pair: Pair) -> Iterator[None]:
    yield pair(0, 40, shift=-CAPACITY)
    yield pair(40, shift=-CAPACITY)


def _values_behind(pair: Pair) -> Iterator[None]:
    pair(1, 40)
    for place in range(41, 45):
        yield pair(place, behind=1)


def _swapped(pair: Pair) -> Iterator[None]:
    pair(0, 40)
    pair(40)
    for place in range(41, 45):
        yield pair(place, swapped=place % 2 == 1)


def _back(pair: Pair) -> Iterator[None]:
    pair(0, 40)
    for place in range(40, 75):
        pair(place)
    yield pair(45)
    yield pair(46, 3)


def _loaded(pair: Pair) -> Iterator[None]:
    """The state of an earlier token is loaded, and the call after it goes back once more."""
    pair(0, 40)
    saved = pair.both(lambda module: {name: item.clone() for name, item in module.state_dict().items()})
    for place in range(40, 75):
        pair(place)
    pair.plain.load_state_dict(saved[0])
    pair.module.load_state_dict(saved[1])
    yield pair(30)
    yield pair(31)


CASES: dict[str, tuple[Callable[[Pair], Iterator[None]], type[errors.CallRefused], tuple[str, ...]]] = {
    "negative": (_negative, errors.PositionsNegative, SCHEMES),
    "negative from the first": (_negative_from_the_first, errors.PositionsNegative, SCHEMES),
    "nonzero values after": (_values_behind, errors.LengthsDiffer, ("dense", "int8", "smartkv(budget=1.0)")),
    "swapped": (_swapped, errors.CachesSwapped, SCHEMES),
    "back": (_back, errors.WindowPassed, ("kivi(bits=4)", "squat(bits=4,rotate=none)")),
    "loaded": (_loaded, errors.WindowPassed, ("kivi(bits=4)", "squat(bits=4,rotate=none)")),
}
each_case = pytest.mark.parametrize(
    ("name", "scheme"), [(name, scheme) for name, (_, _, schemes) in CASES.items() for scheme in schemes],
)


@each_case
def test_the_dense_cache_serves_what_a_compressed_one_refuses(name: str, scheme: str, caplog: pytest.LogCaptureFixture) -> None:
    case, refused, _ = CASES[name]
    pair = Pair(scheme)
    with torch.no_grad(), caplog.at_level(logging.WARNING, "kvcompile"):
        for _ in case(pair):
            assert not pair.compressed
        told = [record.getMessage() for record in caplog.records if "dense" in record.getMessage()]
        assert len(told) == 1, told
        assert "expected" in told[0] and "found" in told[0] and "; " in told[0] and "test_refused_calls.py" in told[0]
        # It stays dense until it is emptied: what codes stand for is not rounded again.
        pair(50)
        assert not pair.compressed
        pair.both(lambda module: (module.keys.zero_(), module.values.zero_()))
        pair(0, 20)
        pair(20)
        assert pair.compressed
    assert issubclass(refused, errors.CallRefused)


@each_case
def test_strict_raises(name: str, scheme: str) -> None:
    case, refused, _ = CASES[name]
    pair = Pair(scheme, strict=True)
    with torch.no_grad():
        with pytest.raises(refused, match=r"expected .* found .*; "):
            for _ in case(pair):
                pass
        assert pair.compressed or name == "negative from the first"


def test_swapped_caches_are_named_by_what_they_were_filled_as() -> None:
    pair = Pair("dense", strict=True)
    with torch.no_grad(), pytest.raises(errors.CachesSwapped, match="cache of keys, found one that was filled as that of values"):
        for _ in _swapped(pair):
            pass


def test_a_copy_of_what_stays_dense_stays_dense_too() -> None:
    pair = Pair("kivi(bits=4)")
    with torch.no_grad():
        for _ in _back(pair):
            pass
        pair.plain, pair.module = copy.deepcopy(pair.plain), copy.deepcopy(pair.module)
        pair.compiled = torch.compile(pair.module, backend=kvcompile.backend("kivi(bits=4)", inner="eager"))
        pair(49)
        assert not pair.compressed
