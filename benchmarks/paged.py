"""Attention and append over pages: one call of a serving engine by scheme, beside SDPA and the kernels over contiguous stores.

    python benchmarks/paged.py [--json FILE] [--schemes int4,int8,..] [--shapes 1x131072,16x32768,mixed] [--page 16] [--no-contiguous]
        [--append 64,8192] [--prompt 2048,8192,2048/32768] [--limit SECONDS]

H=32 query heads, K=8 kv heads, D=128, bfloat16 queries, one new token a row; blocks of a page in random order. "mixed": 64 rows of 1K to
15K tokens. Medians over CUDA-graph replays, so launches are not counted. "Error": of the result, beside the operation's eager body, as a
share of its norm, over the first rows. "Roof": the time that reading the rows' codes takes at 4.3 TB/s. "Contiguous": the compiled model's
kernel of the same scheme over a store of the same lengths, for rows of equal length. SDPA: the faster of cuDNN and flash over contiguous
bfloat16 keys and values of equal length; for mixed rows, the sum of tokens as one row. "Append": tokens of one layer, one for each of 64
requests, or those of a prompt, which fill whole blocks. "Prompt": one row's newest tokens attend to all, beside SDPA over keys and
values with the causal mask of its newest tokens; 2048/32768: a piece of 2,048 tokens of 32,768. The error is that of the newest 16 queries.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
import time
from typing import Any

import torch

sys.path[:0] = [str(pathlib.Path(__file__).resolve().parent.parent), str(pathlib.Path(__file__).resolve().parent)]

import attention as bench
from torch.nn.attention.bias import causal_lower_right

import kvcompile
from kvcompile.serving.operations import paged_attend_body
from kvcompile.serving.pools import Pool

SCHEMES = "dense,int8,fp8,int4,nf4,gauss,beyond,int8-static"
CHECKED = 200_000
"""Tokens of the rows whose results are compared: the eager body decodes them in full."""


def lengths_of(shape: str) -> list[int]:
    """Tokens of each row."""
    if shape == "mixed":
        return torch.randint(1024, 15360, (64,), generator=torch.Generator().manual_seed(0)).tolist()
    batch, tokens = map(int, shape.split("x"))
    return [tokens] * batch


def filled(scheme: str, lengths: list[int], page: int) -> tuple[Pool, list[torch.Tensor]]:
    """A pool with random tokens, and block table, lengths and query starts."""
    need = [-(-tokens // page) for tokens in lengths]
    pool = kvcompile.pool(sum(need), bench.K, bench.D, scheme, page=page, device="cuda")
    order = torch.randperm(sum(need), device="cuda", dtype=torch.int32)
    table = torch.full((len(need), max(need)), -1, dtype=torch.int32, device="cuda")
    for row, blocks in enumerate(order.split(need)):
        table[row, : need[row]] = blocks
    slots = (order.long()[:, None] * page + torch.arange(page, device="cuda")).flatten()
    for part in slots.split(1 << 16):
        pool.append(*torch.randn(2, len(part), bench.K, bench.D, device="cuda", dtype=torch.bfloat16).unbind(), part)
    rows = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return pool, [table, rows, torch.arange(len(need) + 1, dtype=torch.int32, device="cuda")]


def error_of(pool: Pool, q: torch.Tensor, tables: list[torch.Tensor], found: torch.Tensor, lengths: list[int], shown: int) -> float:
    """How far results of the first rows are from the eager body's over float32 queries, of their norm."""
    pages = -(-max(lengths[:shown]) // pool.layout.page)
    few = [tables[0][:shown, :pages].contiguous(), tables[1][:shown], tables[2][: shown + 1]]
    wanted, _ = paged_attend_body(
        q[:shown], pool.data, *few, 1, pool.text, list(pool.key_tables), list(pool.value_tables), bench.D**-0.5
    )
    return float((found[:shown].float() - wanted.float()).norm() / wanted.float().norm())


def attend_row(scheme: str, shape: str, page: int, dense: float, contiguous: bool) -> dict[str, Any]:
    """One row of the table."""
    lengths = lengths_of(shape)
    pool, tables = filled(scheme, lengths, page)
    q = torch.randn(len(lengths), bench.H, bench.D, device="cuda", dtype=torch.bfloat16)
    shown = max(1, sum(1 for row in range(len(lengths)) if sum(lengths[: row + 1]) <= CHECKED))
    error = error_of(pool, q, tables, pool.attend(q, *tables, 1)[0], lengths, shown)
    row: dict[str, Any] = {"shape": shape, "scheme": scheme, "page": page, "runs": pool.runs["attend"], "error": error}
    if not error < 2e-2:
        return {**row, "wrong": True}
    size = sum(lengths) * pool.layout.token_bytes
    ms = bench.graph_ms(lambda: pool.attend(q, *tables, 1))
    row |= {"ms": ms, "roof": size / bench.BANDWIDTH * 1e3 / ms, "of_sdpa": dense / ms}
    if contiguous and shape != "mixed":
        other, *_ = bench.attend_call(scheme, *map(int, shape.split("x")), None)
        row["contiguous_ms"] = bench.graph_ms(other)
    return row


def append_row(scheme: str, tokens: int, page: int) -> dict[str, Any]:
    """Microseconds of one layer's append of ``tokens`` tokens to random slots, beside the time that their bytes take."""
    pool = kvcompile.pool(1 << 15, bench.K, bench.D, scheme, page=page, device="cuda")
    slots = (torch.randperm(len(pool.data), device="cuda")[:, None] * page + torch.arange(page, device="cuda"))
    slots = slots[:tokens, 0].contiguous() if tokens <= 64 else slots.flatten()[:tokens]
    k, v = torch.randn(2, tokens, bench.K, bench.D, device="cuda", dtype=torch.bfloat16).unbind()
    us = bench.graph_ms(lambda: pool.append(k, v, slots)) * 1e3
    size = tokens * (pool.layout.token_bytes + 2 * bench.K * bench.D * 2)
    return {"append": tokens, "scheme": scheme, "page": page, "us": us, "x_bytes": us / (size / bench.BANDWIDTH * 1e6)}


def prompt_row(scheme: str, given: str, page: int) -> dict[str, Any]:
    """Milliseconds of the attention of a prompt's newest tokens over codes, beside SDPA over keys and values."""
    new, tokens = (int(text) for text in (given.split("/") * 2)[:2])
    pool, tables = filled(scheme, [tokens], page)
    tables[2] = torch.tensor([0, new], dtype=torch.int32, device="cuda")
    q = torch.randn(1, bench.H, new, bench.D, device="cuda", dtype=torch.bfloat16)
    k, v = torch.randn(2, 1, bench.K, tokens, bench.D, device="cuda", dtype=torch.bfloat16).unbind()
    mask = causal_lower_right(new, tokens)

    def stock() -> torch.Tensor:
        masked = {"is_causal": True} if new == tokens else {"attn_mask": mask}
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, **masked, enable_gqa=True)

    dense = bench.graph_ms(stock, 3, 5)
    rows = q[0].transpose(0, 1).contiguous()
    # The newest queries alone see what they see among all.
    newest = [tables[0], tables[1], torch.tensor([0, 16], dtype=torch.int32, device="cuda")]
    found = pool.attend(rows, *tables, new)[0][-16:]
    wanted, _ = paged_attend_body(
        rows[-16:], pool.data, *newest, 16, pool.text, list(pool.key_tables), list(pool.value_tables), bench.D**-0.5
    )
    error = float((found.float() - wanted.float()).norm() / wanted.float().norm())
    row: dict[str, Any] = {"prompt": given, "scheme": scheme, "page": page, "error": error}
    if not error < 2e-2:
        return {**row, "wrong": True}
    ms = bench.graph_ms(lambda: pool.attend(rows, *tables, new), 3, 5)
    return {**row, "ms": ms, "sdpa_ms": dense, "of_sdpa": dense / ms}


def dense_ms(shape: str) -> float:
    """SDPA's time, the faster of two kernels."""
    from torch.nn.attention import SDPBackend

    lengths = lengths_of(shape)
    batch, tokens = (1, sum(lengths)) if shape == "mixed" else (len(lengths), lengths[0])
    both = [bench.sdpa_ms(batch, tokens, each) for each in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)]
    return min(each for each in both if each is not None)


def main() -> None:
    """Print one row for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--schemes", default=SCHEMES)
    parser.add_argument("--shapes", default="1x131072,16x32768,mixed")
    parser.add_argument("--page", type=int, default=16)
    parser.add_argument("--append", default="64,8192")
    parser.add_argument("--prompt", default="2048,8192,2048/32768")
    parser.add_argument("--no-contiguous", action="store_true")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds after which nothing new is begun")
    options = parser.parse_args()
    begun, rows = time.time(), []
    print(torch.__version__, torch.cuda.get_device_name(), flush=True)

    def measured(function: Any, *arguments: Any) -> None:
        if time.time() - begun > options.limit:
            return
        try:
            rows.append(function(*arguments))
        except Exception as error:
            rows.append({"what": str(arguments), "failed": f"{type(error).__name__} {str(error)[:300]}"})
        texts = (f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in rows[-1].items())
        print(*texts, flush=True)
        torch._dynamo.reset()
        torch.cuda.empty_cache()

    for shape in options.shapes.split(","):
        dense = dense_ms(shape)
        print(f"{shape}: SDPA {dense:.4f} ms", flush=True)
        rows.append({"shape": shape, "sdpa_ms": dense})
        for scheme in options.schemes.split(","):
            measured(attend_row, scheme, shape, options.page, dense, not options.no_contiguous)
    for tokens in filter(None, options.append.split(",")):
        for scheme in options.schemes.split(","):
            measured(append_row, scheme, int(tokens), options.page)
    for given in filter(None, options.prompt.split(",")):
        for scheme in options.schemes.split(","):
            measured(prompt_row, scheme, given, options.page)
    if options.json:
        options.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
