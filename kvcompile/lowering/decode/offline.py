"""The attend kernel without Inductor and without a device: its source, PTX, cubin, SASS, instruction counts.

The template is rendered with replacements for Inductor's hooks, so the kernel that ``dump`` shows, that runs in
Triton's interpreter and that CI compiles for sm_80, sm_90 and sm_100 is the one that a GPU gets.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from kvcompile.errors import CompileError
from kvcompile.lowering.codegen.expressions import TRITON_TYPES
from kvcompile.lowering.decode.config import AttendConfig, Bias, Tile, plans
from kvcompile.lowering.decode.slot_plan import TemplateSlot
from kvcompile.lowering.decode.template import GLOBALS, SOURCE
from kvcompile.lowering.host.triton_api import POINTERS, compile_for

KERNEL = "kvcompile_attend"
ARCHITECTURES = {"sm_80": 80, "sm_90": 90, "sm_100": 100}


class OfflineCompilation(CompileError):
    """A kernel could not be compiled or disassembled without a device."""

    template = "expected {expected}, found {found}; {todo}"


@dataclasses.dataclass(frozen=True)
class Operand:
    """Size, strides (in elements) and dtype of one operand; entries that are names become run-time arguments."""

    size: tuple[int | str, ...]
    stride: tuple[int | str, ...]
    dtype: torch.dtype

    @staticmethod
    def of(tensor: torch.Tensor) -> Operand:
        """Return the size, strides and dtype of a tensor."""
        return Operand(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype)

    @staticmethod
    def contiguous(size: Sequence[int | str], dtype: torch.dtype) -> Operand:
        """Return a row-major operand of ``size``, in which a str names a run-time argument, and of ``dtype``.

        A name is not multiplied into the strides of the sizes before it, so these strides are right only for a name that is the first size;
        a caller with a name elsewhere replaces the strides.
        """
        strides, step = [], 1
        for extent in reversed(size):
            strides.append(step)
            step = step * extent if isinstance(extent, int) else step
        return Operand(tuple(size), tuple(reversed(strides)), dtype)


def operands_for(config: AttendConfig, batch: int = 1, queries: int = 1) -> dict[str, Operand]:
    """Return the operands of a store with ``PAGES`` pages, by name; strings in sizes and strides are run-time arguments.

    Planes are contiguous. Masks, RoPE tables and newest tokens have strides of their own, also run-time arguments or 0.
    """
    key, value = config.plans
    masks, beside = config.masks, config.beside
    heads = config.kv_heads * config.group
    # Unpaged operands are the new tokens themselves, attended to when nothing is cached.
    pages, rows = ("PAGES", config.page_rows) if config.paged else (1, queries)

    def plane(width: int, dtype: torch.dtype, block: int = 1) -> Operand:
        return Operand.contiguous((pages, batch, config.kv_heads, rows // block, width), dtype)

    def table(plan: TemplateSlot) -> Operand:
        return Operand.contiguous((1, 1, config.kv_heads, plan.dim // plan.group, plan.levels), torch.float32)

    heads_scales = Operand.contiguous((1, 1, config.kv_heads, 1, 1), torch.float32)
    exact_newest = Operand.contiguous((batch, config.kv_heads, "RECENT", config.key_dim), config.dtype)
    rope = Operand((batch if beside.rope_per_batch else 1, "TOKENS", beside.rotary_dim), (0, beside.rotary_dim, 1), torch.float32)
    every = {
        "Q": Operand.contiguous((batch, heads, queries, config.key_dim), config.dtype),
        "HI": Operand.contiguous((batch if masks.hi_per_batch else 1, queries), torch.int64),
        "K_WORDS": plane(key.row_words * key.segments, config.key_word),
        "V_WORDS": plane(value.row_words * value.segments, config.value_word),
        "K_SCALES": plane(key.scales, torch.float16, key.token_block), "V_SCALES": plane(value.scales, torch.float16, value.token_block),
        "K_ZEROS": plane(key.scales, torch.float16, key.token_block), "V_ZEROS": plane(value.scales, torch.float16, value.token_block),
        "K_TABLE": table(key), "V_TABLE": table(value), "K_STATIC": heads_scales, "V_STATIC": heads_scales,
        "K_NORMS": plane(1, torch.float16),
        "LO": Operand.contiguous((batch if masks.lo_per_batch else 1, queries), torch.int64),
        "KEEP": Operand((batch, "TOKENS"), ("TOKENS", 1), torch.bool), "KEPT": Operand((batch, "RUNS"), ("RUNS", 1), torch.int32),
        "BIAS": Operand(
            (batch, heads, queries, "TOKENS"), (0, 0, "TOKENS", 1),
            config.dtype if masks.bias in {Bias.ADDED, Bias.ADDED_OR_REPLACING} else torch.bool,
        ),
        "SINKS": Operand.contiguous((heads,), torch.float32),
        "RECENT_K": dataclasses.replace(exact_newest, stride=("RECENT_HEADS", "RECENT_HEAD", config.key_dim, 1)),
        "RECENT_V": Operand(
            (batch, config.kv_heads, "RECENT", config.value_dim), ("RECENT_HEADS_V", "RECENT_HEAD_V", config.value_dim, 1), config.dtype
        ),
        "EARLY_K": Operand.contiguous((1, batch, config.kv_heads, beside.exact_first, config.key_dim), config.dtype),
        "EARLY_V": Operand.contiguous((1, batch, config.kv_heads, beside.exact_first, config.value_dim), config.dtype),
        "EARLY_AT": Operand.contiguous((1, batch, 1, 1, 1), torch.int64),
        "BASE": Operand.contiguous((batch if beside.base_per_batch else 1,), torch.int64), "COS": rope, "SIN": rope,
    }
    return {name: every[name] for name in config.operands}


def output_for(config: AttendConfig, batch: int = 1, queries: int = 1) -> Operand:
    """Return the kernel's output for ``batch`` rows of ``queries`` queries: the result, or partial sums with their maxima and totals."""
    heads = config.kv_heads * config.group
    if config.direct:
        return Operand.contiguous((batch, heads, queries, config.value_dim), config.dtype)
    return Operand.contiguous((config.splits, batch, heads, queries, config.value_dim + 2), torch.float32)


@functools.cache
def template(source: str) -> Any:
    """Return the jinja template of a kernel's source; cached, since parsing takes longer than rendering."""
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined)
    environment.globals |= GLOBALS
    return environment.from_string(source)


class KernelSignature:
    """A kernel's arguments, as a template queries them: operands, ``OUT``, and the sizes and strides in ``named``.

    As in Inductor, operands cannot be queried before ``def_kernel``.
    """

    def __init__(self, operands: Mapping[str, Operand], named: Sequence[str], options: Mapping[str, Any]) -> None:
        self.operands, self.named, self.options = operands, named, options
        self.begun: tuple[str, ...] = ()

    def def_kernel(self, *names: str) -> str:
        """Return the module's text down to the function's body, with all options as constants."""
        self.begun = names
        arguments = ", ".join((*names, "OUT", *self.named))
        constants = {**self.options, "INDEX_DTYPE": "tl.int64"}
        lines = [f"    {name}: tl.constexpr = {value}" for name, value in constants.items()]
        return "\n".join(["import triton", "import triton.language as tl", "", "", "@triton.jit", f"def {KERNEL}({arguments}):", *lines])

    def size(self, name: str, axis: int) -> str:
        """Return the size of operand ``name`` along ``axis``, as text."""
        return str(self._operand(name).size[axis])

    def stride(self, name: str, axis: int) -> str:
        """Return the stride of operand ``name`` along ``axis``, in elements, as text."""
        return str(self._operand(name).stride[axis])

    def _operand(self, name: str) -> Operand:
        assert name in self.begun, f"{name} is asked for before def_kernel, where Inductor knows no operand"
        return self.operands[name]


def named_sizes(operands: Iterable[Operand]) -> list[str]:
    """Return the names of sizes and strides that are arguments at run time."""
    return sorted({each for operand in operands for each in (*operand.size, *operand.stride) if isinstance(each, str)})


def render(config: AttendConfig, operands: Mapping[str, Operand], out: Operand) -> str:
    """Return a standalone ``@triton.jit`` module; arguments are the operands, the output, then named sizes."""
    made = KernelSignature(operands, named_sizes((*operands.values(), out)), config.options())

    def store_output(indices: Sequence[str], value: str, mask: str, indent_width: int = 4, val_shape: object = None) -> str:
        del indent_width, val_shape
        at = " + ".join(f"({index}) * {step}" for index, step in zip(indices, out.stride, strict=True))
        return f"tl.store(OUT + ({at}), ({value}).to({TRITON_TYPES[out.dtype]}), mask={mask})"

    text = template(SOURCE).render(
        plans=plans, def_kernel=made.def_kernel, size=made.size, stride=made.stride, store_output=store_output, **config.options(),
    )
    return "\n".join(line.rstrip() for line in text.splitlines() if line.strip()) + "\n"


def attend_source(config: AttendConfig, batch: int = 1, queries: int = 1) -> str:
    """Return the source of the kernel that ``config`` describes, for a contiguous store of any number of pages.

    ``batch``, ``queries``: batch rows and new tokens.
    """
    return render(config, operands_for(config, batch, queries), output_for(config, batch, queries))


def load_module(source: str, kind: str = "attend") -> types.ModuleType:
    """Return the rendered module, imported from a file, since Triton reads the source text of its functions.

    Writes the file, named after ``kind`` and a hash, to a folder of the user's among the temporary files.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    folder = pathlib.Path(tempfile.gettempdir()) / f"kvcompile-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{kind}_{digest}.py"
    # Another process may read the same file: written whole, then renamed.
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".part", delete=False) as part:
        part.write(source)
    pathlib.Path(part.name).replace(path)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def compile_offline(source: str, config: AttendConfig, arch: str = "sm_90", batch: int = 1) -> dict[str, str | bytes]:
    """Return ``ttgir``, ``ptx`` and ``cubin`` of a rendered source; needs no device.

    Raises OfflineCompilation for an unknown architecture.
    """
    return compile_rendered(source, operands_for(config, batch), output_for(config), config.tile, arch)


def compile_rendered(source: str, operands: Mapping[str, Operand], out: Operand, tile: Tile, arch: str) -> dict[str, str | bytes]:
    """Return ``ttgir``, ``ptx`` and ``cubin`` of a source that a template rendered for these operands.

    Raises OfflineCompilation for an unknown architecture.
    """
    if arch not in ARCHITECTURES:
        raise OfflineCompilation(expected=f"one of {sorted(ARCHITECTURES)}", found=arch, todo="pass one of these")
    kernel = getattr(load_module(source), KERNEL)
    pointers = {**{name: operand.dtype for name, operand in operands.items()}, "OUT": out.dtype}
    signature = {name: POINTERS[pointers[name]] if name in pointers else "i32" for name in kernel.arg_names}
    return compile_for(kernel, signature, pointers, ARCHITECTURES[arch], tile.num_warps, tile.num_stages)


def sass(cubin: bytes) -> str:
    """Return the machine code as text, by the disassembler in triton's package. Raises OfflineCompilation if it is missing or fails."""
    import triton

    tool = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    if not tool.exists():
        raise OfflineCompilation(expected=f"nvdisasm at {tool}", found="no such file", todo="install triton's Linux wheel")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([str(tool), "-c", file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise OfflineCompilation(expected="nvdisasm to read the cubin", found=done.stderr.strip(), todo="report this")
    return done.stdout
