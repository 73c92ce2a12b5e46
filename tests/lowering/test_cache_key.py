"""Inductor's caches on disk must not serve a kernel of an older source or of another plan.

They hash the graph, not the lowerings of out-of-tree operations; the salt is what makes the difference.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import fx
from torch._dynamo.utils import counters
from torch._inductor.custom_graph_pass import CustomGraphPass

import kvcompile
from kvcompile import schemes
from kvcompile.errors import BadScheme
from kvcompile.lowering import cache_key
from kvcompile.lowering.cache_key import PACKAGE, SALTED, CacheKey, sources_hash
from kvcompile.lowering.compile import inductor_patches, own_functions
from kvcompile.lowering.ops import operations
from kvcompile.lowering.ops.append_window import append_window_body
from kvcompile.lowering.persistent_keys import SOURCES
from kvcompile.schemes import Int4
from kvcompile.settings import Settings


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the package to change."""
    shutil.copytree(PACKAGE, tmp_path / "kvcompile", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "kvcompile"


def test_same_sources_same_hash(package: Path) -> None:
    assert sources_hash(package) == sources_hash()


@pytest.mark.parametrize("name", SALTED)
def test_any_source_that_makes_kernels_changes_the_hash(package: Path, name: str) -> None:
    target = package / name if name.endswith(".py") else next((package / name).glob("*.py"))
    before = sources_hash(package)
    cache_key._hash.cache_clear()
    target.write_text(target.read_text() + "\n# another kernel\n")
    assert sources_hash(package) != before


@pytest.mark.parametrize("name", [
    "extensions/certified/kernels/finish.py", "extensions/smartkv/scheme.py", "extensions/beyond/threshold_rows.py",
    "extensions/static_scales/static_rows.py", "extensions/squat/subspace.py",
])
def test_an_edit_in_an_extension_changes_every_key(package: Path, name: str) -> None:
    """Kernels and schemes of extensions stand in compiled graphs, and verdicts were reached with them."""
    keys = sources_hash(package), sources_hash(package, SOURCES)
    cache_key._hash.cache_clear()
    (package / name).write_text((package / name).read_text() + "\n# another kernel\n")
    assert not {sources_hash(package), sources_hash(package, SOURCES)} & set(keys)


def test_a_new_file_and_a_new_name_change_the_hash(package: Path) -> None:
    before = sources_hash(package)
    (package / "schemes" / "novel.jinja").write_text("{{ kernel }}")
    cache_key._hash.cache_clear()
    added = sources_hash(package)
    (package / "schemes" / "novel.jinja").rename(package / "schemes" / "other.jinja")
    cache_key._hash.cache_clear()
    assert len({before, added, sources_hash(package)}) == 3


def test_what_makes_no_kernel_does_not_recompile(package: Path) -> None:
    before = sources_hash(package)
    (package / "report" / "page.py").write_text("")
    cache_key._hash.cache_clear()
    assert sources_hash(package) == before


class Users(CustomGraphPass):
    """A pass of the user's own."""

    def __init__(self, name: str) -> None:
        self.name, self.seen = name, 0

    def __call__(self, graph: torch.fx.Graph) -> None:
        self.seen += 1

    def uuid(self) -> str:
        return self.name


def test_uuid_speaks_of_sources_plan_and_the_users_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = CacheKey("int8:past"), CacheKey("int4:past"), CacheKey("int8:fresh"), CacheKey("int8:past", Users("a"))
    uuids = {key.uuid() for key in keys}
    assert len(uuids) == 4
    assert CacheKey("int8:past").uuid() in uuids
    monkeypatch.setattr(cache_key, "sources_hash", lambda: "another")
    assert CacheKey("int8:past").uuid() not in uuids


def test_users_pass_still_runs() -> None:
    users = Users("mine")
    CacheKey("plan", users)(torch.fx.Graph())
    assert users.seen == 1
    patches = inductor_patches(Settings(), None, {"post-grad-custom-pre-pass": users}, "plan")
    assert patches["post_grad_custom_pre_pass"].then is users


@pytest.fixture
def own_disk_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_dynamo: None) -> Iterator[None]:
    """A cache directory for this test alone."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    counters.clear()
    yield
    counters.clear()


class Step(torch.nn.Module):
    """One attention over a buffer, small enough to compile in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(1, 1, 64, 16))
        self.register_buffer("v", torch.zeros(1, 1, 64, 16))

    def forward(self, x: torch.Tensor, pos: torch.Tensor) -> torch.Tensor:
        self.k.index_copy_(2, pos, x)
        self.v.index_copy_(2, pos, x)
        mask = torch.arange(64) <= pos[:, None]
        return torch.nn.functional.scaled_dot_product_attention(x, self.k, self.v, attn_mask=mask)


def lookups() -> tuple[int, int]:
    """(hits, misses) of both caches on disk since the last call."""
    seen = counters["inductor"], counters["aot_autograd"]
    names = ("fxgraph_cache_{}", "autograd_cache_{}")
    found = tuple(sum(group[name.format(kind)] for group, name in zip(seen, names, strict=True)) for kind in ("hit", "miss"))
    counters.clear()
    return found  # type: ignore[return-value]


def compiled_step() -> tuple[int, int]:
    """Compile the step as a new process would, and say what the disk caches answered."""
    torch._dynamo.reset()
    step = torch.compile(Step(), backend=kvcompile.backend("int8", strict=True), fullgraph=True)
    with torch.no_grad():
        step(torch.ones(1, 1, 1, 16), torch.tensor([0]))
    return lookups()


def test_functions_of_a_graph_have_one_order() -> None:
    """Their names are part of the key on disk; in the order of a set every second process would compile what another one has."""
    graph = fx.Graph()
    bodies = (operations.rotate_channels_body, append_window_body, operations.append_body, operations.attend_body)
    for body in bodies:
        graph.call_function(body)
    names = [f"{body.__module__}.{body.__name__}" for body in bodies]
    assert own_functions(graph) == tuple(sorted(names)) != tuple(names)


@pytest.mark.compile
@pytest.mark.usefixtures("own_disk_cache")
def test_disk_cache_serves_the_same_sources_only(monkeypatch: pytest.MonkeyPatch) -> None:
    config = torch._inductor.config.patch(fx_graph_cache=True, fx_graph_remote_cache=False)
    with config, torch._functorch.config.patch(enable_autograd_cache=True, enable_remote_autograd_cache=False):
        hits, misses = compiled_step()
        assert misses and not hits
        hits, misses = compiled_step()
        assert hits and not misses, "the cache on disk is not used at all"
        monkeypatch.setattr(cache_key, "sources_hash", lambda: "edited sources")
        hits, misses = compiled_step()
        assert misses and not hits, "a stale kernel was served"


SCHEME = """
import dataclasses
import kvcompile
from kvcompile.schemes import Int4

@kvcompile.register
@dataclasses.dataclass(frozen=True)
class Mine(Int4):
    name = "mine"
"""


def test_an_edited_scheme_of_another_package_changes_the_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemes.BY_NAME, "found", dict(schemes.BY_NAME.found))
    hashes = [sources_hash()]
    for name, extra in (("one", ""), ("two", "    bits = 3\n")):
        (tmp_path / f"{name}.py").write_text(SCHEME + extra)
        spec = importlib.util.spec_from_file_location(name, tmp_path / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        hashes.append(sources_hash())
    assert len(set(hashes)) == 3


@pytest.mark.parametrize("given", [Int4, Int4(), type("Loose", (Int4,), {"name": "int4"}), object])
def test_what_is_no_scheme_of_its_own_is_not_registered(given: object) -> None:
    with pytest.raises(BadScheme, match=r"kvcompile.register expects"):
        kvcompile.register(given)
