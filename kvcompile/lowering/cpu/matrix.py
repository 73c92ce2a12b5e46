"""C++ text of ``kvcompile::attend`` for many bfloat16 rows (prefill): both products as bfloat16 matrix products.

Used if q is bfloat16, every value that the codes unpack to is exactly a bfloat16 (dense bfloat16, integers
of at most 8 bits, e4m3, token scales applied separately) and the machine multiplies bfloat16 matrices: then
q . k loses nothing, and only the weights are rounded, as SDPA rounds them. The products are ATen's brgemm,
whose second operand has pairs of rows (VNNI): tiles are packed while they are decoded.
"""

from __future__ import annotations

import torch

from kvcompile.types import KernelFormat


def unpacks_to_bfloat16(fmt: KernelFormat) -> bool:
    """Return whether every unscaled value is exactly a bfloat16; False for words of more than a byte, tables and zero points."""
    if fmt.levels or fmt.zeros:
        return False
    if not fmt.scaled and not fmt.static:
        return fmt.word_dtype == torch.bfloat16
    if fmt.word_dtype.itemsize > 1:
        return False
    words = torch.arange(256, dtype=torch.int32, device="cpu").to(torch.uint8).view(fmt.word_dtype)
    values = torch.stack([fmt.unpack(words, part) for part in range(fmt.parts)])
    return torch.equal(values.nan_to_num(), values.nan_to_num().to(torch.bfloat16).to(torch.float32))
