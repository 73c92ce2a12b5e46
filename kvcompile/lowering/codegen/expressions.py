"""Prints ``KernelFormat.unpack`` as one expression: for Triton on blocks, for C++ on scalars.

``unpack`` is the only definition of a word's values. It is traced with torch.fx, run once on a one-word tensor for
every intermediate dtype under eager's promotion rules, and printed, so that kernels cannot deviate from the scheme.
``_SYMBOLS`` and ``_print`` list the printable operations; any other raises ``UnprintableUnpack``.

e4m3 is printed as integer arithmetic, so that it also runs on sm_80 and vectorises in C++: exact for the
254 finite codes. The two NaN codes print as +-480 instead of NaN; that is sound because schemes write
them only into groups whose scale is NaN already (a scheme without scales would need another expression).
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable

import torch
import torch.fx

from kvcompile.errors import CompileError
from kvcompile.types import KernelFormat

_SYMBOLS: dict[Callable[..., object], str] = {
    operator.rshift: ">>", operator.lshift: "<<", operator.and_: "&", operator.or_: "|", operator.xor: "^",
    operator.add: "+", operator.sub: "-", operator.mul: "*",
}

TRITON_TYPES: dict[torch.dtype, str] = {
    torch.uint8: "tl.uint8", torch.int8: "tl.int8", torch.uint16: "tl.uint16", torch.int16: "tl.int16",
    torch.uint32: "tl.uint32", torch.int32: "tl.int32", torch.int64: "tl.int64",
    torch.float16: "tl.float16", torch.bfloat16: "tl.bfloat16", torch.float32: "tl.float32",
}

CPP_TYPES: dict[torch.dtype, str] = {
    torch.uint8: "uint8_t", torch.int8: "int8_t", torch.uint16: "uint16_t", torch.int16: "int16_t",
    torch.uint32: "uint32_t", torch.int32: "int32_t", torch.int64: "int64_t",
    torch.float16: "at::Half", torch.bfloat16: "at::BFloat16", torch.float32: "float",
}

CPP_PRELUDE = """
template <typename To, typename From> static inline To kvc_bitcast(From from) {
  static_assert(sizeof(To) == sizeof(From), "bitcast between sizes");
  To to;
  __builtin_memcpy(&to, &from, sizeof(To));
  return to;
}
// e4m3 -> float without float32 subnormals, which a process may flush to zero: integer significand
// (with its hidden bit) times a power of two.
static inline float kvc_e4m3(uint8_t word) {
  const int32_t exponent = (word >> 3) & 15;
  const int32_t normal = exponent < 1 ? exponent : 1;
  const int32_t power = (exponent > 1 ? exponent : 1) + 117;
  const uint32_t bits = ((uint32_t)power << 23) | ((uint32_t)(word & 128) << 24);
  return (float)((word & 7) + (normal << 3)) * kvc_bitcast<float>(bits);
}
"""
"""C++ helpers that a file with a ``cpp_expression`` must contain once; needs only <cstdint>."""


class UnprintableUnpack(CompileError):
    """A scheme's ``unpack`` uses an operation for which no kernel expression exists."""

    template = (
        "expected unpack to use only >> << & | ^ + - *, .to(dtype) and .view(dtype), found {found}; rewrite the scheme's "
        "unpack with these, or teach kvcompile/lowering/codegen/expressions.py to print it"
    )


def triton_expression(fmt: KernelFormat, part: int, word: str) -> str:
    """Return part ``part`` of every word, as a float32 Triton expression on the block named ``word``.

    Raises UnprintableUnpack for unknown operations.
    """
    return _expression(fmt, part, word, _TritonCasts())


def cpp_expression(fmt: KernelFormat, part: int, word: str) -> str:
    """Return part ``part`` of one word, as a float C++ expression on the lvalue ``word``; needs CPP_PRELUDE.

    Raises UnprintableUnpack for unknown operations.
    """
    return _expression(fmt, part, word, _Cpp())


@functools.lru_cache(maxsize=256)
def trace_unpack(fmt: KernelFormat, part: int) -> tuple[torch.fx.Graph, dict[str, torch.dtype]]:
    """Return the graph of ``unpack(words, part)``, and the dtype of each of its nodes by name.

    Raises UnprintableUnpack if it cannot be traced.
    """
    try:
        graph = torch.fx.Tracer().trace(_unary(fmt, part))
        probe = _Dtypes(torch.fx.GraphModule(torch.nn.Module(), graph))
        probe.run(torch.zeros(1, dtype=fmt.word_dtype, device="cpu"))
    except (torch.fx.proxy.TraceError, TypeError, RuntimeError, ValueError) as error:
        raise UnprintableUnpack(found=f"a function that cannot be traced ({error})") from error
    return graph, probe.dtypes


def _unary(fmt: KernelFormat, part: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def unpack_part(words: torch.Tensor) -> torch.Tensor:
        return fmt.unpack(words, part)

    return unpack_part


class _Dtypes(torch.fx.Interpreter):
    """An interpreter that records the result dtype of each node."""

    def __init__(self, module: torch.fx.GraphModule) -> None:
        super().__init__(module)
        self.dtypes: dict[str, torch.dtype] = {}

    def run_node(self, n: torch.fx.Node) -> object:
        result = super().run_node(n)
        if isinstance(result, torch.Tensor):
            self.dtypes[n.name] = result.dtype
        return result


class _TritonCasts:
    """Casts in Triton syntax; integer operations already stay in the block's dtype."""

    def name(self, dtype: torch.dtype) -> str:
        if dtype not in TRITON_TYPES:
            raise UnprintableUnpack(found=f"dtype {dtype}")
        return TRITON_TYPES[dtype]

    def cast(self, text: str, source: torch.dtype, to: torch.dtype) -> str:
        return text if source == to else f"{text}.to({self.name(to)})"

    def bitcast(self, text: str, source: torch.dtype, to: torch.dtype) -> str:
        del source
        return f"{text}.to({self.name(to)}, bitcast=True)"

    def narrow(self, text: str, to: torch.dtype) -> str:
        del to
        return text

    def literal(self, value: object, dtype: torch.dtype) -> str:
        del dtype
        return repr(value)

    def e4m3(self, text: str) -> str:
        # Sign and seven magnitude bits into a float16 whose exponent bias is larger by 8; float16
        # subnormals are never flushed, and 256 * is exact.
        wide = f"{text}.to(tl.uint16)"
        bits = f"((({wide} & 128) << 8) | (({wide} & 127) << 7))"
        return f"({bits}.to(tl.float16, bitcast=True).to(tl.float32) * 256.0)"


class _Cpp:
    """Casts in C++ syntax; every integer result is narrowed again after C++'s promotion to int."""

    def name(self, dtype: torch.dtype) -> str:
        if dtype not in CPP_TYPES:
            raise UnprintableUnpack(found=f"dtype {dtype}")
        return CPP_TYPES[dtype]

    def cast(self, text: str, source: torch.dtype, to: torch.dtype) -> str:
        return text if source == to else f"static_cast<{self.name(to)}>({text})"

    def bitcast(self, text: str, source: torch.dtype, to: torch.dtype) -> str:
        return f"kvc_bitcast<{self.name(to)}>(static_cast<{self.name(source)}>({text}))"

    def narrow(self, text: str, to: torch.dtype) -> str:
        return f"static_cast<{self.name(to)}>{text}"

    def literal(self, value: object, dtype: torch.dtype) -> str:
        return f"static_cast<{self.name(dtype)}>({value!r})"

    def e4m3(self, text: str) -> str:
        return f"kvc_e4m3({text})"


def _expression(fmt: KernelFormat, part: int, word: str, language: _TritonCasts | _Cpp) -> str:
    graph, dtypes = trace_unpack(fmt, part)
    printed: dict[str, str] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            printed[node.name] = word
        elif node.op == "output":
            result = node.args[0]
            return language.cast(printed[result.name], dtypes[result.name], torch.float32)
        else:
            printed[node.name] = _print(node, printed, dtypes, language)
    raise UnprintableUnpack(found="a graph without an output")


def _print(
    node: torch.fx.Node, printed: dict[str, str], dtypes: dict[str, torch.dtype], language: _TritonCasts | _Cpp
) -> str:
    """Return one node's expression; ``printed`` has those of its operands. Raises UnprintableUnpack for an operation that is not listed."""
    to = dtypes.get(node.name)
    if to is None:
        raise UnprintableUnpack(found=f"{node.format_node()}, which is no tensor")
    if node.op == "call_function" and node.target in _SYMBOLS:
        sides = []
        for arg in node.args:
            if isinstance(arg, torch.fx.Node):
                sides.append(language.cast(printed[arg.name], dtypes[arg.name], to))
            else:
                sides.append(language.literal(arg, to))
        return language.narrow(f"({sides[0]} {_SYMBOLS[node.target]} {sides[1]})", to)
    if node.op != "call_method" or node.target not in ("to", "view", "float"):
        raise UnprintableUnpack(found=f"{node.op} {node.target}")
    source = node.args[0]
    if not isinstance(source, torch.fx.Node) or len(node.args) + len(node.kwargs) > 2:
        raise UnprintableUnpack(found=f"{node.target} with the arguments {node.args[1:]} {dict(node.kwargs)}")
    held = dtypes[source.name]
    if node.target == "view":
        if to.itemsize != held.itemsize:
            raise UnprintableUnpack(found=f"a view of {held} as {to}, which changes the size of a word")
        # A view as e4m3 keeps the byte; the conversion that must follow is what gets printed.
        is_e4m3 = to == torch.float8_e4m3fn
        return printed[source.name] if is_e4m3 else language.bitcast(printed[source.name], held, to)
    if held == torch.float8_e4m3fn:
        return language.cast(language.e4m3(printed[source.name]), torch.float32, to)
    return language.cast(printed[source.name], held, to)
