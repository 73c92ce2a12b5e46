"""One prefill kernel as data: the computation, fixed by the site, tiles and splits. The many-row counterpart of ``decode.config``."""

from __future__ import annotations

import dataclasses

import torch

from kvcompile.lowering.decode.config import Bias, KernelConfig, Tile, named_dtype
from kvcompile.lowering.prefill.slot import TileSlot, tile_slot
from kvcompile.lowering.prefill.table_slot import TableSlot, chunk_slot
from kvcompile.types import Role

RAISED = 15
"""Float16 probabilities are multiplied by 2 to this power, so that the smallest ones keep their bits."""

SQUARE = Tile(64, 128, False, 8, 3)


@dataclasses.dataclass(frozen=True)
class PrefillConfig(KernelConfig):
    """A complete description of one rendered prefill kernel; hashable.

    ``chunk``: if above 0, the kernel sees that many tokens, from a position given at run time, and adds to the partial sums of earlier
    chunks (``chunked``). Only ``offline`` renders such kernels.
    """

    exact_newest: bool = False
    base_per_batch: bool = False
    tile: Tile = SQUARE
    chunk: int = 0

    @property
    def direct(self) -> bool:
        """Whether the kernel writes the finished result."""
        return self.splits == 1 and not self.chunk

    def with_splits(self, splits: int) -> PrefillConfig:
        """Return the configuration with ``splits`` splits of the tokens."""
        return dataclasses.replace(self, splits=splits)

    def over_scratch(self) -> PrefillConfig:
        """Return the kernel that attends to the tokens of a decoded chunk: dense, in one page of ``chunk`` rows."""
        return dataclasses.replace(
            self, key_scheme="dense", value_scheme="dense", key_word=self.dtype, value_word=self.dtype, page_rows=self.chunk, paged=False
        )

    @property
    def slots(self) -> tuple[TileSlot, TileSlot]:
        """Plans of the key and the value slot; ``fits`` must hold."""
        key, value = self._slots()
        assert key is not None
        assert value is not None
        return key, value

    def _slots(self) -> tuple[TileSlot | None, TileSlot | None]:
        return (
            tile_slot(self.key_scheme, Role.KEY, self.key_dim, self.key_word, self.dtype, self.packed),
            tile_slot(self.value_scheme, Role.VALUE, self.value_dim, self.value_word, self.dtype, self.packed),
        )

    def _decoded(self) -> tuple[TileSlot | TableSlot | None, TileSlot | TableSlot | None]:
        return (
            chunk_slot(self.key_scheme, Role.KEY, self.key_dim, self.key_word, self.dtype, self.packed),
            chunk_slot(self.value_scheme, Role.VALUE, self.value_dim, self.value_word, self.dtype, self.packed),
        )

    @property
    def decoded(self) -> tuple[TileSlot | TableSlot, TileSlot | TableSlot]:
        """Plans for decoding chunks of the key and the value slot; ``chunks`` must hold."""
        key, value = self._decoded()
        assert key is not None
        assert value is not None
        return key, value

    @property
    def chunks(self) -> bool:
        """Whether chunks of both slots can be decoded: paged, without a bias, and codes that unpack or index tables."""
        return self.paged and self.masks.bias is Bias.NONE and None not in self._decoded()

    @property
    def fits(self) -> bool:
        """Whether the template supports this attention; the decode template handles a bias."""
        slots = self._slots()
        return self.masks.bias is Bias.NONE and all(slot is not None and (self.paged or not slot.scaled) for slot in slots)

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the template's inputs, in order.

        If keys are codes, Q is the queries as ``normalized`` returns them; attention to exact newest tokens then also gets them unchanged
        (Q_RAW).
        """
        key, value = self.slots
        names = ["Q", "HI", "K_WORDS", "V_WORDS"]
        present = (
            (key.scaled, "Q_SCALES"), (key.scaled, "K_SCALES"), (key.zeros, "K_ZEROS"),
            (value.scaled, "V_SCALES"), (value.zeros, "V_ZEROS"),
            (self.masks.lo, "LO"), (self.masks.keep, "KEEP"), (self.exact_newest, "RECENT_K"), (self.exact_newest, "RECENT_V"),
            (self.exact_newest, "BASE"),
            (self.exact_newest and key.scaled, "Q_RAW"), (self.direct and self.masks.sinks, "SINKS"),
        )
        return (*names, *(name for there, name in present if there))

    def options(self) -> dict[str, object]:
        """Return the template's constants."""
        return {
            **self.shared_options(), "FOLDED": int(self.softcap <= 0 and self.scale > 0), "DIRECT": int(self.direct),
            "HAS_RECENT": int(self.exact_newest), "BASE_B": int(self.base_per_batch), "RAISED": RAISED, "CHUNK": self.chunk,
        }


def slots(
    key_scheme: str, value_scheme: str, key_dim: int, value_dim: int, key_word: str, value_word: str, query: str, packed: int
) -> tuple[TileSlot, TileSlot]:
    """Return both slots' plans from the template's constants; the template calls this while it is rendered."""
    dtype = named_dtype(query)
    key = tile_slot(key_scheme.strip("'"), Role.KEY, key_dim, named_dtype(key_word), dtype, bool(packed))
    value = tile_slot(value_scheme.strip("'"), Role.VALUE, value_dim, named_dtype(value_word), dtype, bool(packed))
    assert key is not None
    assert value is not None
    return key, value


def normalized(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries [B, H, S, D] in float16, each row scaled to at most one by a power of two, and the inverse factors [B, H, S].

    The lowering does this in Inductor's own operations; this is the eager form.
    """
    top = q.to(torch.float32).abs().amax(-1, keepdim=True).clamp(min=SMALLEST)
    exponent = torch.floor(torch.log2(top)) + 1
    return (q.to(torch.float32) * torch.exp2(-exponent)).to(torch.float16), torch.exp2(exponent).squeeze(-1)


SMALLEST = 2.0**-100
"""Least magnitude that a row of queries is scaled by."""
