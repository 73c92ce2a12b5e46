"""Switches of Inductor and Dynamo that change what a graph looks like: parameters in the graph, a C++ wrapper, a damaged cache."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch._inductor.config
import torch.nn.functional as F
from torch import nn
from torch._inductor.utils import fresh_cache, run_and_get_code

import kvcompile
from kvcompile.errors import DamagedCache, NotCompiled, OwnFault
from kvcompile.lowering.compile import compiling, inline_append
from kvcompile.lowering.damaged import rebuilding
from kvcompile.lowering.host.inductor_entry import module_key

Tensor = torch.Tensor
SLOTS, WIDTH = 24, 32


@pytest.fixture(autouse=True)
def _fresh(one_thread: None, fresh_dynamo: None) -> None:
    """Small tensors on one thread, nothing compiled before."""


class Attention(nn.Module):
    """One head over buffers; ``scale`` is a parameter that is a constant of the graph once it is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.scale = nn.Linear(WIDTH, 3 * WIDTH), nn.Parameter(torch.rand(WIDTH))
        self.plain = torch.rand(WIDTH)
        for name in "kv":
            self.register_buffer(name, torch.zeros(1, 1, SLOTS, WIDTH))

    def forward(self, x: Tensor, pos: Tensor) -> Tensor:
        q, k, v = self.qkv(x * self.scale.erf() * self.plain)[:, None].chunk(3, -1)
        self.k.index_copy_(2, pos, k)
        self.v.index_copy_(2, pos, v)
        return F.scaled_dot_product_attention(q, self.k, self.v, attn_mask=torch.arange(SLOTS)[None] <= pos[:, None])


class Summing(Attention):
    """Has a second way in, which reads the cache outside of attention: a graph without a site."""

    def total(self, x: Tensor) -> Tensor:
        """The sum of the keys."""
        return self.qkv(x).sum() + self.k.sum()


def drive(call: Callable[..., Tensor], counts: tuple[int, ...] = (5, 1, 1, 3, 1)) -> list[Tensor]:
    """Results of a prompt and steps behind it."""
    random, at, results = torch.Generator().manual_seed(0), 0, []
    with torch.no_grad():
        for count in counts:
            results.append(call(torch.randn(1, count, WIDTH, generator=random), torch.arange(at, at + count)).clone())
            at += count
    return results


def made(cls: type[Attention] = Attention) -> Any:
    torch.manual_seed(0)
    return cls().eval()


SWITCHES: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "freezing": lambda: torch._inductor.config.patch(freezing=True),
    "prepare_freezing": lambda: torch._dynamo.config.patch(prepare_freezing=True),
    "install_free_tensors": lambda: torch._dynamo.config.patch(install_free_tensors=True),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize(("scheme", "bound"), [("dense", 1e-5), ("int8", 2e-2)])
def test_parameters_and_caches_that_are_attributes_of_the_graph(scheme: str, bound: float, switch: str, dynamic: bool | None) -> None:
    module, backend = made(), kvcompile.backend(scheme, inner="eager")
    expected = drive(copy.deepcopy(module))
    with SWITCHES[switch]():
        found = drive(torch.compile(module, backend=backend, dynamic=dynamic))
    assert all((a - b).norm() <= bound * a.norm() for a, b in zip(expected, found, strict=True))
    assert backend.report().sites and not backend.report().refusals
    assert backend.report().allocated, "the cache stayed dense"


def test_a_cache_that_is_an_attribute_is_compressed_by_another_graph() -> None:
    """No guard of Dynamo's sees it: the graph that was compiled while it was dense decodes it."""
    module, backend = made(Summing), kvcompile.backend("int8", inner="eager")
    plain, x = copy.deepcopy(module), torch.ones(1, 1, WIDTH)
    with torch._inductor.config.patch(freezing=True), torch.no_grad():
        total, forward = torch.compile(module.total, backend=backend), torch.compile(module.forward, backend=backend)
        assert torch.allclose(total(x), plain.total(x))
        drive(forward)
        drive(plain)
        assert type(module.k).__name__ == "CompressedCache"
        found, expected = total(x), plain.total(x)
    assert torch.isfinite(found) and (found - expected).abs() <= 2e-2 * plain.k.abs().sum()


def test_without_gradients_parameters_may_need_none() -> None:
    module, backend = made().requires_grad_(False), kvcompile.backend("int8", inner="eager")
    with torch._inductor.config.patch(freezing=True):
        drive(torch.compile(module, backend=backend))
    assert backend.report().sites and not backend.report().refusals


def test_inductor_freezes_what_it_is_told_to() -> None:
    module, backend = made(), kvcompile.backend("int8")
    expected = drive(copy.deepcopy(module), (5, 1))
    with torch._inductor.config.patch(freezing=True):
        found, sources = run_and_get_code(lambda: drive(torch.compile(module, backend=backend), (5, 1)))
    assert all((a - b).norm() <= 2e-2 * a.norm() for a, b in zip(expected, found, strict=True))
    assert backend.report().allocated and all("_frozen_param" in source for source in sources)


def test_a_cpp_wrapper() -> None:
    module, backend = made(), kvcompile.backend("int8")
    expected = drive(copy.deepcopy(module), (5, 1))
    found = drive(torch.compile(module, backend=backend, options={"cpp_wrapper": True}), (5, 1))
    assert all((a - b).norm() <= 2e-2 * a.norm() for a, b in zip(expected, found, strict=True))
    assert backend.report().allocated and not backend.report().refusals


def test_no_input_looks_exported() -> None:
    """Inductor's C++ wrapper asks placeholders for ``val``, and takes a graph that has any for an exported one."""
    graph = torch.fx.symbolic_trace(lambda x: x + 1)
    for node in graph.graph.nodes:
        node.meta["val"] = torch.ones(1)
    assert not any("val" in node.meta for node in inline_append(graph).graph.find_nodes(op="placeholder"))


# --- a damaged cache ------------------------------------------------------------------------------------


@pytest.fixture
def _own_cache() -> Iterator[None]:
    """Inductor's cache in a folder of its own."""
    with fresh_cache():
        yield


def _library(name: str = "entry.main.so") -> Path:
    path = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]) / "ab" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"")
    return path


@pytest.mark.usefixtures("_own_cache")
def test_a_damaged_entry_is_removed_and_compiled_again(caplog: pytest.LogCaptureFixture) -> None:
    paths = [_library("one.main.so"), _library("two.so")]

    def build() -> str:
        for path in paths:
            if path.exists() and not path.stat().st_size:
                try:
                    raise ImportError(f"{path}: file too short")
                except ImportError as error:
                    raise RuntimeError(f"InductorError: ImportError: {path}: file too short") from error
        return "built"

    assert rebuilding(build) == "built" and not any(path.exists() for path in paths)
    assert len([item for item in caplog.records if "is damaged" in item.getMessage()]) == 2


@pytest.mark.parametrize(
    "left", [lambda text: text[: len(text) // 2], lambda text: "", lambda text: "raise NameError"], ids=["half", "none", "junk"],
)
@pytest.mark.usefixtures("_own_cache")
def test_a_damaged_module_is_written_again(left: Callable[[str], str]) -> None:
    drive(torch.compile(made(), backend=kvcompile.backend("int8")), (5, 1))
    modules = list(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.py"))
    whole = {path: path.read_text() for path in modules}
    for path, text in whole.items():
        path.write_text(left(text))
    torch._dynamo.reset()
    module, backend = made(), kvcompile.backend("int8")
    expected = drive(copy.deepcopy(module), (5, 1))
    found = drive(torch.compile(module, backend=backend), (5, 1))
    assert all((a - b).norm() <= 2e-2 * a.norm() for a, b in zip(expected, found, strict=True))
    assert backend.report().allocated and not backend.report().refusals
    assert modules and {path: path.read_text() for path in modules} == whole


@pytest.mark.usefixtures("_own_cache")
def test_a_module_that_is_whole_is_left_alone() -> None:
    """One that fails for another reason is no damaged entry."""
    path = _library(f"{module_key('raise NameError')}.py")
    path.write_text("raise NameError")

    def build() -> None:
        exec(compile(path.read_text(), path, "exec"))

    with pytest.raises(NameError):
        rebuilding(build)
    assert path.exists()
    path.write_text("raise NameError # half")
    with pytest.raises(FileNotFoundError):
        rebuilding(build)


@pytest.mark.usefixtures("_own_cache")
def test_an_entry_that_stays_damaged_is_named() -> None:
    path = _library()

    def build() -> None:
        path.write_bytes(b"")
        raise ImportError(f"{path}: invalid ELF header")

    with pytest.raises(DamagedCache, match=f"{path}.*delete") as caught:
        rebuilding(build)
    assert "report this model" not in str(caught.value)


@pytest.mark.usefixtures("_own_cache")
def test_a_library_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "libother.so"
    path.write_bytes(b"")

    def build() -> None:
        raise ImportError(f"{path}: file too short")

    with pytest.raises(ImportError):
        rebuilding(build)
    assert path.exists()


# --- whose fault it is ----------------------------------------------------------------------------------


def test_an_error_of_ours_is_not_the_compilers() -> None:
    def compiler() -> None:
        with compiling():
            try:
                inline_append(None)  # type: ignore[arg-type]
            except AttributeError as error:
                raise RuntimeError("a compiler says that it failed") from error

    with pytest.raises(OwnFault, match=r"AttributeError.*lowering/compile\.py:\d+.*fault of kvcompile") as caught:
        compiler()
    assert str(caught.value).count("please report") == 1


def test_an_error_of_the_compiler_is_not_ours() -> None:
    with pytest.raises(NotCompiled) as caught, compiling():
        raise RuntimeError("no such instruction")
    assert type(caught.value) is NotCompiled


def test_a_graph_that_is_not_compiled_advises_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no such instruction")

    real = kvcompile.variants.compile_graph
    monkeypatch.setattr("kvcompile.variants.compile_graph", lambda *args, **kwargs: (fails if kwargs["plan"] else real)(*args, **kwargs))
    module, backend = made(), kvcompile.backend("int8", inner="eager")
    drive(torch.compile(module, backend=backend), (5, 1))
    refusals = {str(refusal) for refusal in backend.report().refusals}
    assert refusals and all(text.count("please report") == 1 and "no such instruction" in text for text in refusals)
    assert not backend.report().sites and not backend.report().allocated


def test_a_prompt_that_is_not_compiled_leaves_the_steps_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the call into the empty cache fails, and the report says which."""
    real = kvcompile.variants.compile_graph

    def fails(*args: Any, **kwargs: Any) -> Any:
        if kwargs["plan"].endswith("fresh"):
            raise RuntimeError("no such instruction")
        return real(*args, **kwargs)

    monkeypatch.setattr("kvcompile.variants.compile_graph", fails)
    module, backend = made(), kvcompile.backend("int8", inner="eager")
    expected = drive(copy.deepcopy(module), (5, 1, 1))
    found = drive(torch.compile(module, backend=backend), (5, 1, 1))
    assert all((a - b).norm() <= 2e-2 * a.norm() for a, b in zip(expected, found, strict=True))
    report = backend.report()
    assert report.allocated and [len(graph.sites) for graph in report.graphs] == [0, 1] and len(report.refusals) == 1
    assert len(report.stayed_dense) == 1 and "no such instruction" in report.stayed_dense[0]
    assert "left a cache dense" in str(report) and "no such instruction" in " ".join(str(report).split())
