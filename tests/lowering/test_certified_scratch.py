"""The scratch of original keys that lie in host memory: the same results as without it, never a stale block, memory as announced.

The stores, the appends and the kernels are those of a model; on a CPU the kernels run in Triton's interpreter (``interpreted``), on CUDA
the originals are in pinned memory.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from interpreted import interpreted  # noqa: E402

from kvcompile import schemes  # noqa: E402
from kvcompile.errors import BadOption  # noqa: E402
from kvcompile.lowering.certificate.telemetry import COLUMNS, Telemetry  # noqa: E402
from kvcompile.lowering.certified.device_step import DeviceStep, certified_by_kernels  # noqa: E402
from kvcompile.lowering.certified.kernels.stage_keys import given  # noqa: E402
from kvcompile.lowering.ops.append_window import append_window_body  # noqa: E402
from kvcompile.lowering.ops.operands import AttendOperands  # noqa: E402
from kvcompile.lowering.ops.operations import as_tokens  # noqa: E402
from kvcompile.runtime.exact_window import rewind  # noqa: E402
from kvcompile.runtime.store import Store, StoreSpec  # noqa: E402
from kvcompile.schemes.certificate.policy import Count, parse_policy  # noqa: E402
from kvcompile.schemes.certificate.telemetry import TELEMETRY  # noqa: E402
from kvcompile.schemes.certified import BLOCK, PLACES, SCRATCH, SET, Certified  # noqa: E402
from kvcompile.types import PAGE, Role, SlotSpec, pages_for  # noqa: E402

K, G, D = 2, 2, 32
SPELLED = "certified(certify=tau_cov:0.0/k_min:3/k_max:3/widen:0/rank:0/v_tol:inf/fallback:report, tier2=host{})"


class Layer:
    """The stores of one layer, and attention over them."""

    def __init__(self, device: str, options: str = "", batch: int = 1, policy: str = SPELLED) -> None:
        scheme = schemes.parse(policy.format(options))
        assert isinstance(scheme, Certified)
        self.device, self.scheme = torch.device(device), scheme
        self.stores = []
        for role in Role:
            slot, half = SlotSpec(K, D, torch.float32, role), scheme.of(role)
            self.stores.append(Store(StoreSpec(slot, half, half.layout(slot)), batch, self.device, 0))
        self.telemetry = torch.zeros(1, batch, K, 1, TELEMETRY, dtype=torch.float64, device=self.device)

    def plane(self, name: str) -> torch.Tensor | None:
        """A plane of the keys."""
        return next((plane for plane, spec in self.stores[0].described() if spec.name == name), None)

    def write(self, x: torch.Tensor, at: int) -> list[torch.Tensor]:
        """Append x [2, B, K, S, D] at a position; the newest tokens."""
        recent = []
        for store, new in zip(self.stores, x, strict=True):
            store.reserve(pages_for(at + new.shape[2]))
            planes, pos = store.planes[: store.spec.layout.written], torch.arange(at, at + new.shape[2], device=self.device)[None]
            recent.append(append_window_body(new, planes, pos, None, store.spec.scheme.spell())[0])
        return recent

    def scratch(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The operand of the kernels."""
        places, held = self.plane(PLACES), self.plane(SCRATCH)
        return None if places is None or held is None else (places, held)

    def attend(self, x: torch.Tensor, q: torch.Tensor, at: int) -> tuple[torch.Tensor, ...]:
        """What queries [B, H, 1, D] get with one new token: output, figures, counters."""
        recent, (keys, values) = self.write(x, at), (store.planes for store in self.stores)
        return certified_by_kernels(
            parse_policy(self.scheme.certify), self.scheme, self.operands(q, at, recent), [keys[4], values[4]], self.telemetry, splits=2,
            telemetry=self.telemetry, scratch=self.scratch(),
        )

    def operands(self, q: torch.Tensor, at: int, recent: list[torch.Tensor]) -> AttendOperands[torch.Tensor]:
        """The operands of ``attend`` over the codes."""
        keys, values = (store.planes[:4] for store in self.stores)
        hi, base = (torch.tensor(x, device=self.device) for x in ([[at]], [at - self.scheme.window]))
        return AttendOperands(q, keys, values, hi, None, None, None, None, "certified", "certified", 0.4, 0.0, D, recent, base)

    def read(self, x: torch.Tensor, q: torch.Tensor, at: int) -> None:
        """The same up to the exact logits, which must be those of the originals, wherever they were read; no block may look damaged."""
        recent, (keys, values), scratch = self.write(x, at), (store.planes for store in self.stores), self.scratch()
        run = DeviceStep(parse_policy(self.scheme.certify), self.scheme, self.operands(q, at, recent), [keys[4], values[4]], 2)
        run.key_scores()
        read, explored = run.select_blocks(self.telemetry)
        assert scratch is not None
        found = run.exact_scores(scratch, run.stage_keys(scratch, read, explored, self.telemetry, self.telemetry))
        self.telemetry[..., 0] += 1
        assert not run.damaged.any() and (read.sum(-1) == 3).all()
        wanted = q.unflatten(1, (K, G))[..., 0, :].double() @ as_tokens(keys[4]).double().mT * 0.4
        wanted = wanted.unflatten(-1, (-1, BLOCK)).amax(-1)
        assert torch.allclose(found.peak[read != 0].double(), wanted[read != 0], atol=1e-5)

    def told(self) -> tuple[float, float]:
        """Blocks that were found in the scratch, and those read over the bus."""
        told = Telemetry.of([self.telemetry])
        return told["scratch"], told["fetched"]

    def sound(self) -> int:
        """Every block that is somewhere is there as it is in tier 2, and no slot has two; how many there are."""
        places, held, originals = self.plane(PLACES), self.plane(SCRATCH), self.plane("originals")
        assert places is not None and held is not None and originals is not None
        pages, batch = places.shape[:2]
        slots, count = held.shape[3] * SET // PAGE, 0
        for b in range(batch):
            for h in range(K):
                seen = set()
                for n in range(pages * PAGE // BLOCK):
                    place = int(places[n * BLOCK // PAGE, b, h, n % (PAGE // BLOCK), 0])
                    if not place:
                        continue
                    assert (n // SET, place) not in seen and 0 < place <= slots
                    seen.add((n // SET, place))
                    row = (place - 1) * BLOCK
                    page, row = n // SET * (SET * BLOCK // PAGE) + row // held.shape[3], row % held.shape[3]
                    mine = held[page, b, h, row : row + BLOCK]
                    assert torch.equal(mine, originals[n * BLOCK // PAGE, b, h, n * BLOCK % PAGE :][:BLOCK]), (n, place)
                    count += 1
        return count


def numbers(device: str, *shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def queries(device: str, batch: int, step: int, same: float = 0.7) -> torch.Tensor:
    """Queries of which a part is the same at every step."""
    return same * numbers(device, 1, K * G, 1, D, seed=2) + (1 - same) * numbers(device, batch, K * G, 1, D, seed=200 + step)


def same_results(device: str) -> None:
    """Whole steps, bit for bit as without a scratch; with more blocks promoted than there are slots, with blocks explored."""
    many = "certified(certify=tau_cov:0.0/k_min:9/k_max:9/widen:0/rank:0/v_tol:inf/explore:0.2/fallback:report, tier2=host{})"
    for policy, options in ((many, ""), (SPELLED, ", scratch=16")):
        layers = [Layer(device, options, 1, policy), Layer(device, ", scratch=0", 1, policy)]
        for layer in layers:
            layer.write(numbers(device, 2, 1, K, 290, D, seed=1), 0)
        for step in range(2):
            x, q = numbers(device, 2, 1, K, 1, D, seed=100 + step), queries(device, 1, step)
            results = [layer.attend(x, q, 290 + step) for layer in layers]
            for mine, wanted in zip(*results, strict=True):
                assert torch.equal(mine, wanted), step
            assert not (results[0][2][..., Count.CAUSES]).any() and layers[0].sound() > 0
        assert layers[0].told()[0] > 0 and layers[1].told() == (0, 0)
        assert policy is SPELLED or layers[0].told()[1] > 2 * (4 + 1) * K, "more than slots"


def counted(device: str) -> None:
    """The same queries again: each block comes over the bus once, and from then on it is there."""
    # As many blocks of one set as there are slots.
    layer = Layer(device, policy=SPELLED.replace("3", "2"))
    layer.write(numbers(device, 2, 1, K, 240, D, seed=1), 0)
    q, first = numbers(device, 1, K * G, 1, D, seed=2), None
    for step in range(3):
        counts = layer.attend(numbers(device, 2, 1, K, 1, D, seed=3 + step), q, 240 + step)[2]
        assert (counts[..., Count.KEYS] == 2).all()
        if first is None:
            first = layer.told()
            assert first[0] == 0 and 2 * K <= first[1] <= 2 * K * G and layer.sound() == first[1]
        assert layer.told() == (step * first[1], first[1])


def onwards(layer: Layer, at: int) -> int:
    """Nothing happens."""
    del layer
    return at


def back(layer: Layer, at: int) -> int:
    """A crop, into blocks that were promoted; what is written from there on is new."""
    there = at // BLOCK * BLOCK - 2 * BLOCK
    for store in layer.stores:
        rewind(store, there)
    layer.write(numbers(str(layer.device), 2, layer.stores[0].batch, K, 30, D, seed=300 + at), there)
    return there + 30


def anew(layer: Layer, at: int) -> int:
    """A static cache that is filled again, once, from the first position, over what it holds; in part."""
    if at != 271:
        return at
    layer.write(numbers(str(layer.device), 2, 1, K, 200, D, seed=at), 0)
    return 200


def grown(layer: Layer, at: int) -> int:
    """Room for more, by which a set that ended early gets further slots."""
    for store in layer.stores:
        store.reserve(store.pages + 1)
    return at


def reordered(layer: Layer, at: int) -> int:
    """Beams: batch rows go where others were, one to two places."""
    rows = torch.tensor([1, 0, 0] if at % 2 else [1, 1, 0])
    layer.stores = [store.select_rows(rows) for store in layer.stores]
    layer.telemetry = layer.telemetry.index_select(1, rows.to(layer.device))
    return at


def copied(layer: Layer, at: int) -> int:
    """A deep copy goes on, and the one that it was made from too."""
    kept = layer.stores
    layer.stores = [store.clone() for store in kept]
    back(layer, at)
    layer.stores = kept
    return at


def cleared(layer: Layer, at: int) -> int:
    """Everything is forgotten, and other tokens come."""
    for store in layer.stores:
        store.clear()
    layer.write(numbers(str(layer.device), 2, 1, K, 270, D, seed=at), 0)
    return 270


CHANGES = (onwards, back, anew, grown, reordered, copied, cleared)


def never_stale(device: str, change: Callable[[Layer, int], int]) -> None:
    """Whatever changes a block's originals takes it out; whatever moves rows takes copies and places along."""
    layer = Layer(device, batch=2 if change is reordered else 1)
    layer.write(numbers(device, 2, layer.stores[0].batch, K, 270, D, seed=1), 0)
    at, held = 270, 0
    # The first change finds an empty scratch. Those that move rows or go back are made again, or read once more, over what they left.
    for step in range(3 if change in {back, anew, reordered} else 2):
        at = change(layer, at)
        batch = layer.stores[0].batch
        layer.sound()
        layer.read(numbers(device, 2, batch, K, 1, D, seed=100 + step), queries(device, batch, step), at)
        held = layer.sound()
        at += 1
    assert held > 0 and layer.told()[1] > 0 and (layer.told()[0] > 0 or change is cleared)


def a_stale_block_would_be_seen(device: str) -> None:
    """What these tests look for can be found: a copy that is not what is in tier 2 fails the check of notes."""
    layer = Layer(device)
    layer.write(numbers(device, 2, 1, K, 240, D, seed=1), 0)
    held = layer.plane(SCRATCH)
    assert held is not None
    layer.read(numbers(device, 2, 1, K, 1, D, seed=3), queries(device, 1, 0), 240)
    held.mul_(3)
    with pytest.raises(AssertionError):
        layer.sound()
    with pytest.raises(AssertionError):
        layer.read(numbers(device, 2, 1, K, 1, D, seed=3), queries(device, 1, 0), 241)


@triton.jit
def places_given(PLACE, USED, ASKED, MISSES, THEN, BLOCKS, exists, SLOTS: tl.constexpr):
    i = tl.arange(0, 16)
    slot = tl.arange(0, SLOTS)
    then, block = given(
        tl.load(PLACE + i), tl.load(USED + i), tl.load(ASKED + i) != 0, tl.load(MISSES + i) != 0, slot < exists, SLOTS
    )
    tl.store(THEN + i, then)
    tl.store(BLOCKS + slot, block)


def assigned(device: str) -> None:
    """Who gets which slot, against a list of slots by when they were last asked for."""
    draw = torch.Generator().manual_seed(1)
    for slots in (4, 8, 16):
        place, used = torch.zeros(16, dtype=torch.int32), torch.zeros(16, dtype=torch.int32)
        for step in range(1, 25):
            exists = slots // 2 if step < 5 else slots
            asked = torch.rand(16, generator=draw) < 0.3
            misses = asked & (place == 0) & (torch.rand(16, generator=draw) < 0.8)
            then, block = torch.zeros(16, dtype=torch.int32, device=device), torch.zeros(slots, dtype=torch.int32, device=device)
            given_now = [x.to(device) for x in (place, used, asked.to(torch.int8), misses.to(torch.int8))]
            places_given[(1,)](*given_now, then, block, exists, SLOTS=slots)
            held = {int(p) - 1: n for n, p in enumerate(place) if p}
            order = [s for s in range(exists) if s not in held]
            order += sorted((s for s in held if not asked[held[s]]), key=lambda s: (int(used[held[s]]), s))
            wanted = place.clone()
            for n, s in zip(misses.nonzero().flatten().tolist(), order, strict=False):
                if s in held:
                    wanted[held[s]] = 0
                wanted[n] = s + 1
            assert torch.equal(then.cpu(), wanted), (slots, step)
            for s, n in enumerate(block.tolist()):
                assert n == -1 or (misses[n] and wanted[n] == s + 1)
            place = wanted
            used = torch.where(asked & (place > 0), step, used).to(torch.int32)


CASES: dict[str, tuple[Callable[..., None], ...]] = {
    case.__name__: (case,) for case in (assigned, counted, same_results, a_stale_block_would_be_seen)
} | {f"never stale: {change.__name__}": (never_stale, change) for change in CHANGES}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("case", CASES)
def test_the_scratch_on_a_device(case: str) -> None:
    function, *more = CASES[case]
    function("cuda", *more)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_the_scratch_in_the_interpreter(case: str) -> None:
    function, *more = CASES[case]
    interpreted(function, "cpu", *more)


@pytest.mark.parametrize("scratch", [0, 4, 8, 16])
def test_memory_announced_is_memory_allocated(scratch: int) -> None:
    scheme = schemes.parse(f"certified(tier2=host, scratch={scratch})").of(Role.KEY)
    slot = SlotSpec(K, D, torch.bfloat16, Role.KEY)
    layout = scheme.layout(slot)
    store = Store(StoreSpec(slot, scheme, layout), 3, torch.device("cpu"), 5)
    assert store.nbytes == layout.nbytes(5, 3, K)
    plain = schemes.parse("certified").of(Role.KEY).layout(slot)
    more = PAGE * D * 2 * scratch // SET + (PAGE // BLOCK * 8 if scratch else 0)
    assert layout.bytes_per_page - plain.bytes_per_page == more
    encoded = scheme.encode(numbers("cpu", 1, K, PAGE, D, seed=1).to(torch.bfloat16))
    assert len(encoded) == layout.encoded == 5 + (scratch > 0)
    for made, spec in zip(encoded, layout.planes, strict=False):
        assert (made.dtype, made.shape[2:]) == (spec.dtype, (spec.rows, spec.width)), spec.name
    assert [spec.name for spec in layout.planes if spec.tally] == ([SCRATCH] if scratch else [])
    names = [spec.name for spec in schemes.parse("certified(tier2=host)").of(Role.VALUE).layout(slot).planes]
    assert PLACES not in names and SCRATCH not in names


def test_slots_are_an_option_of_the_scheme() -> None:
    made = schemes.parse("certified(tier2=host, scratch=8)")
    assert isinstance(made, Certified) and made.slots == 8 and schemes.parse(made.spell()) == made
    assert schemes.parse("certified(scratch=8)").slots == 0, "nothing is copied from the device to the device"  # type: ignore[attr-defined]
    for bad in (1, -4, 32, True):
        with pytest.raises(BadOption):
            Certified(scratch=bad)
    assert len(COLUMNS) == TELEMETRY
