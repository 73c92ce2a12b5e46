"""Compressed caches through ``torch.save`` and ``torch.load`` as torch has it by default, with ``weights_only``."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import io
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from learned_tables import random_tables
from static_scales import random_scales

import kvcompile
from kvcompile.extensions.beyond.tables import ModelTables
from kvcompile.files.pickled import RENAMED, STORED, classes
from kvcompile.passes.match.sites import Axes
from kvcompile.runtime.handle.operations import rebuild
from kvcompile.runtime.store.store import StoreSpec
from kvcompile.schemes import BY_NAME, SCHEMES, Int8, parse

pytestmark = pytest.mark.usefixtures("one_thread", "fresh_dynamo")

CAPACITY, HEAD = 300, 64


class Buffers(torch.nn.Module):
    """One attention over buffers."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("k", "v"):
            self.register_buffer(name, torch.zeros(1, 2, CAPACITY, HEAD))

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        """Attend to tokens up to each query's own."""
        self.k.index_copy_(2, pos, k)
        self.v.index_copy_(2, pos, v)
        hidden = torch.arange(CAPACITY) > pos[:, None]
        return (q @ self.k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ self.v


def filled(scheme: Any) -> torch.Tensor:
    """The compressed keys of 150 random tokens."""
    model = Buffers()
    compiled = torch.compile(model, backend=kvcompile.backend(scheme, inner="eager", strict=True))
    with torch.no_grad():
        compiled(*(torch.randn(1, 2, 150, HEAD) for _ in "qkv"), torch.arange(150))
    return model.k


def options() -> list[Any]:
    """Schemes that hold tables or scales of a model or more options than the defaults, which a law of ``kvcompile.testing`` saves."""
    tables, scales = random_tables([""], groups=2), random_scales([""])
    assert isinstance(tables.tables, ModelTables)
    return [tables, scales, "int8(sinks=4)", "kivi(rotate=kv)", "int4(rotate=k)", "nf4(window=32,sinks=4)"]


def schemes() -> list[Any]:
    """Every scheme of the package as it is by default, and those with more."""
    plain = [kind.name for kind in SCHEMES if kind.name != "beyond"]
    return [*plain, "beyond(trained=False)", *options()]


@pytest.mark.parametrize("scheme", options(), ids=str)
def test_a_cache_comes_back_from_torch_load(scheme: Any) -> None:
    keys = filled(scheme)
    assert type(keys).__name__ == "CompressedCache"
    file = io.BytesIO()
    torch.save({"keys": keys}, file)
    file.seek(0)
    back = torch.load(file)["keys"]
    assert type(back).__name__ == "CompressedCache" and repr(back) == repr(keys)
    assert torch.equal(kvcompile.decoded(back), kvcompile.decoded(keys))


def test_a_scheme_from_outside_comes_back_too() -> None:
    kvcompile.register(Mine)
    try:
        test_a_cache_comes_back_from_torch_load("int8-of-mine")
    finally:
        del BY_NAME["int8-of-mine"]
        parse.cache_clear()


@dataclasses.dataclass(frozen=True)
class Mine(Int8):
    """Int8 under another name."""

    name: ClassVar[str] = "int8-of-mine"


@pytest.mark.parametrize("scheme", ["kivi", "certified"])
def test_another_process_needs_the_import_alone(scheme: str, tmp_path: Path) -> None:
    torch.save({"keys": filled(scheme)}, tmp_path / "cache.pt")
    text = f"import torch, kvcompile; print(torch.load({str(tmp_path / 'cache.pt')!r})['keys'])"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=False)
    assert f"CompressedCache(shape=(1, 2, 300, 64), tokens=150, {scheme}" in done.stdout, done.stderr


def test_the_table_of_pickles_has_every_class_that_a_cache_may_hold() -> None:
    """A class that is missing would be loaded after an import of its module, and refused in a process that only loads a file."""
    roots = [*SCHEMES, StoreSpec, Axes]
    held = {(item.__module__, item.__qualname__) for item in (rebuild, *(item for root in roots for item in classes(root)))}
    assert held == {(module, name) for module, (names, _) in STORED.items() for name in names}


def earlier(data: bytes, moved: bool = True) -> bytes:
    """What version 0.1 wrote for the same objects: a pickle of the protocols up to 2 says modules and names as lines of text.

    Not ``moved``: with today's modules and the names of then.
    """
    for module, (names, former) in STORED.items():
        place = former if moved and former is not None else module
        old = {new: name for name, new in RENAMED.get(module, {}).items()}
        for name in names:
            data = data.replace(f"c{module}\n{name}\n".encode(), f"c{place}\n{old.get(name, name)}\n".encode())
    for name, was in (("exact_first", "early"), ("key_or_value", "half")):
        data = data.replace(_text(name), _text(was))
    return data


def _text(name: str) -> bytes:
    """A pickle's bytes for a name of a field."""
    return b"X" + len(name).to_bytes(4, "little") + name.encode()


def saved(value: Any, moved: bool = True) -> io.BytesIO:
    """A file of ``torch.save`` as version 0.1 wrote it."""
    file, former = io.BytesIO(), io.BytesIO()
    torch.save(value, file)
    with zipfile.ZipFile(file) as written, zipfile.ZipFile(former, "w") as changed:
        for item in written.infolist():
            data = written.read(item)
            if item.filename.endswith("/data.pkl"):
                assert earlier(data, moved) != data, "nothing has another name or module"
                data = earlier(data, moved)
            changed.writestr(item.filename, data)
    former.seek(0)
    return former


@pytest.mark.parametrize("scheme", schemes(), ids=str)
def test_a_cache_that_version_0_1_wrote_comes_back(scheme: Any) -> None:
    keys = filled(scheme)
    written = earlier(pickle.dumps(keys, protocol=2))
    assert b"ckvcompile.runtime.operations\nrebuild\n" in written and _text("early") in written and _text("exact_first") not in written
    back = torch.load(saved(keys))
    assert repr(back) == repr(keys) and torch.equal(kvcompile.decoded(back), kvcompile.decoded(keys))
    again = pickle.loads(written)
    assert repr(again) == repr(keys) and torch.equal(kvcompile.decoded(again), kvcompile.decoded(keys))


@pytest.mark.parametrize("scheme", ["int8", "nf4", "fp8-static", "beyond(trained=False)"])
def test_a_cache_from_before_the_option_has_no_window(scheme: str) -> None:
    """Its schemes were pickled without the field; it goes on as a cache of the same text."""
    model = Buffers()
    compiled = torch.compile(model, backend=kvcompile.backend(scheme, inner="eager", strict=True))
    q, k, v = (torch.randn(1, 2, 152, HEAD) for _ in "qkv")
    with torch.no_grad():
        compiled(*(x[:, :, :150] for x in (q, k, v)), torch.arange(150))
        former = copy.deepcopy((model.k, model.v))
        for store in (store for cache in former for store in cache._kv.stores.values()):
            vars(store.spec.scheme).pop("window", None)
        back = pickle.loads(pickle.dumps(former))
        stores = [store for cache in back for store in cache._kv.stores.values()]
        assert stores and all("window" not in vars(store.spec.scheme) for store in stores)
        assert all(store.spec.scheme == parse(scheme) and store.spec.scheme.window == 0 for store in stores)
        expected = compiled(*(x[:, :, 150:151] for x in (q, k, v)), torch.tensor([150]))
        model.k, model.v = back
        assert torch.equal(compiled(*(x[:, :, 150:151] for x in (q, k, v)), torch.tensor([150])), expected)


@pytest.mark.parametrize(
    ("module", "old", "new"), [(module, old, new) for module, names in RENAMED.items() for old, new in names.items()], ids=str
)
@pytest.mark.parametrize("moved", [True, False], ids=["old module", "old name"])
def test_a_class_that_was_renamed_loads_under_its_old_name(module: str, old: str, new: str, moved: bool) -> None:
    assert new in STORED[module][0]
    members = list(getattr(importlib.import_module(module), new))
    data = pickle.dumps(members, protocol=2)
    assert f"\n{old}\n".encode() in earlier(data, moved)
    assert pickle.loads(earlier(data, moved)) == members
    assert torch.load(saved(members, moved)) == members
