"""The scratch of originals in host memory, keys and values: the same results as without it, never a stale block, memory as announced.

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
from kvcompile.extensions.certified.device_step import DeviceStep, Scratches, certified_by_kernels  # noqa: E402
from kvcompile.extensions.certified.kernels.stage_blocks import given, turns  # noqa: E402
from kvcompile.extensions.certified.scheme import BLOCK, PLACES, SCRATCH, SET, Certified  # noqa: E402
from kvcompile.lowering.certificate.summary import Telemetry  # noqa: E402
from kvcompile.lowering.ops.append_window import append_window_body  # noqa: E402
from kvcompile.lowering.ops.operands import AttendOperands  # noqa: E402
from kvcompile.lowering.ops.operations import as_tokens  # noqa: E402
from kvcompile.runtime.store.exact_window import rewind  # noqa: E402
from kvcompile.runtime.store.store import Store, StoreSpec  # noqa: E402
from kvcompile.schemes.certificate.policy import Count, parse_policy  # noqa: E402
from kvcompile.schemes.certificate.telemetry import TELEMETRY  # noqa: E402
from kvcompile.types import PAGE, Role, SlotSpec, pages_for  # noqa: E402

K, G, D = 2, 2, 32
SPELLED = "certified(certify=tau_cov:0.0/k_min:3/k_max:3/widen:0/rank:0/v_tol:{}/fallback:report, tier2=host{})"
SMALL = ", scratch=16, value_scratch=32"


class Layer:
    """The stores of one layer, and attention over them."""

    def __init__(self, device: str, options: str = SMALL, batch: int = 1, policy: str = SPELLED, v_tol: str = "inf") -> None:
        scheme = schemes.parse(policy.format(v_tol, options))
        assert isinstance(scheme, Certified)
        self.device, self.scheme = torch.device(device), scheme
        self.stores = []
        for role in Role:
            slot, half = SlotSpec(K, D, torch.float32, role), scheme.for_role(role)
            self.stores.append(Store(StoreSpec(slot, half, half.layout(slot)), batch, self.device, 0))
        self.telemetry = torch.zeros(1, batch, K, 1, TELEMETRY, dtype=torch.float64, device=self.device)

    def plane(self, name: str, half: int = 0) -> torch.Tensor | None:
        """A plane of the keys, or of the values."""
        return next((plane for plane, spec in self.stores[half].described() if spec.name == name), None)

    def write(self, x: torch.Tensor, at: int) -> list[torch.Tensor]:
        """Append x [2, B, K, S, D] at a position; the newest tokens."""
        exact_newest = []
        for store, new in zip(self.stores, x, strict=True):
            store.reserve(pages_for(at + new.shape[2]))
            planes, pos = store.planes[: store.spec.layout.written], torch.arange(at, at + new.shape[2], device=self.device)[None]
            exact_newest.append(append_window_body(new, planes, pos, None, store.spec.scheme.spec())[0])
        return exact_newest

    def scratch(self) -> Scratches:
        """The operand of the kernels."""
        both = [(self.plane(PLACES, half), self.plane(SCRATCH, half)) for half in range(2)]
        return Scratches(*(None if places is None or held is None else (places, held) for places, held in both))

    def attend(self, x: torch.Tensor, q: torch.Tensor, at: int) -> tuple[torch.Tensor, ...]:
        """What queries [B, H, 1, D] get with one new token: output, figures, counters."""
        exact_newest, (keys, values) = self.write(x, at), (store.planes for store in self.stores)
        return certified_by_kernels(
            parse_policy(self.scheme.certify), self.scheme, self.operands(q, at, exact_newest), [keys[4], values[4]], self.telemetry,
            splits=2,
            telemetry=self.telemetry, scratch=self.scratch(),
        )

    def operands(self, q: torch.Tensor, at: int, exact_newest: list[torch.Tensor]) -> AttendOperands[torch.Tensor]:
        """The operands of ``attend`` over the codes."""
        keys, values = (store.planes[:4] for store in self.stores)
        hi, base = (torch.tensor(x, device=self.device) for x in ([[at]], [at - self.scheme.window]))
        return AttendOperands(q, keys, values, hi, None, None, None, None, "certified", "certified", 0.4, 0.0, D, exact_newest, base)

    def read(self, x: torch.Tensor, q: torch.Tensor, at: int, promoted: int = 3) -> None:
        """The same up to the exact logits, which must be those of the originals, wherever they were read; no block may look damaged."""
        exact_newest, (keys, values), scratch = self.write(x, at), (store.planes for store in self.stores), self.scratch()
        run = DeviceStep(parse_policy(self.scheme.certify), self.scheme, self.operands(q, at, exact_newest), [keys[4], values[4]], 2)
        run.key_scores()
        read, _, explored = run.select_blocks(self.telemetry)
        assert scratch.keys is not None
        found = run.exact_scores(run.staged(scratch.keys, keys[4], read, explored, "key", self.telemetry, self.telemetry))
        self.telemetry[..., 0] += 1
        assert not run.damaged.any() and (read.sum(-1) == promoted).all()
        wanted = q.unflatten(1, (K, G))[..., 0, :].double() @ as_tokens(keys[4]).double().mT * 0.4
        wanted = wanted.unflatten(-1, (-1, BLOCK)).amax(-1)
        assert torch.allclose(found.peak[read != 0].double(), wanted[read != 0], atol=1e-5)

    def told(self, half: str = "key") -> tuple[float, float]:
        """Blocks that were found in the scratch, and those read over the bus."""
        told = Telemetry.of([self.telemetry])
        return told[f"{half}_found"], told[f"{half}_fetched"]

    def sound(self, half: int = 0) -> int:
        """Every block that is somewhere is there as it is in tier 2, and no slot has two; how many there are."""
        places, held, originals = (self.plane(name, half) for name in (PLACES, SCRATCH, "originals"))
        assert places is not None and held is not None and originals is not None
        pages, batch = places.shape[:2]
        sets, count = held.shape[3] // (SET * BLOCK), 0
        for b in range(batch):
            for h in range(K):
                seen = set()
                for n in range(pages * PAGE // BLOCK):
                    place = int(places[n * BLOCK // PAGE, b, h, n % (PAGE // BLOCK), 0])
                    if not place:
                        continue
                    assert (n % sets, place) not in seen and 0 < place <= SET
                    seen.add((n % sets, place))
                    row = (n % sets * SET + place - 1) * BLOCK
                    mine = held[0, b, h, row : row + BLOCK]
                    assert torch.equal(mine, originals[n * BLOCK // PAGE, b, h, n * BLOCK % PAGE :][:BLOCK]), (n, place)
                    count += 1
        return count


def numbers(device: str, *shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device)


def queries(device: str, batch: int, step: int, same: float = 0.7) -> torch.Tensor:
    """Queries of which a part is the same at every step."""
    return same * numbers(device, 1, K * G, 1, D, seed=2) + (1 - same) * numbers(device, batch, K * G, 1, D, seed=200 + step)


def same_results(device: str) -> None:
    """Whole steps, bit for bit as without a scratch; with more blocks promoted than there are slots, with blocks explored, with values."""
    many = "certified(certify=tau_cov:0.0/k_min:18/k_max:18/widen:0/rank:0/v_tol:{}/explore:0.2/fallback:report, tier2=host{})"
    for policy, v_tol, options in ((many, "0.03", SMALL), (SPELLED, "0.005", ", scratch=32, value_scratch=16")):
        layers = [Layer(device, each, 1, policy, v_tol) for each in (options, ", scratch=0, value_scratch=0")]
        for layer in layers:
            layer.write(numbers(device, 2, 1, K, 330, D, seed=1), 0)
        for step in range(2):
            x, q = numbers(device, 2, 1, K, 1, D, seed=100 + step), queries(device, 1, step)
            results = [layer.attend(x, q, 330 + step) for layer in layers]
            for mine, wanted in zip(*results, strict=True):
                assert torch.equal(mine, wanted), step
            assert not (results[0][2][..., Count.CAUSES]).any() and (results[0][2][..., Count.VALUES] > 0).any()
            assert layers[0].sound() > 0 and layers[0].sound(1) > 0
        assert layers[0].told()[0] > 0 and layers[0].told("value")[0] > 0 and layers[1].told() == layers[1].told("value") == (0, 0)
        assert policy is SPELLED or layers[0].told()[1] > 3 * 8 * K, "more than slots"
        told = [Telemetry.of([layer.telemetry]) for layer in layers]
        # Without a scratch every row reads what is promoted or explored; with one, what was fetched. A block is 16 tokens of float32.
        assert told[1]["key_bytes"] == (told[1]["keys"] + told[1]["explored"]) * BLOCK * D * 4
        assert told[1]["value_bytes"] == (told[1]["values"] + told[1]["explored"]) * BLOCK * D * 4
        for half in ("key", "value"):
            assert told[0][f"{half}_bytes"] == layers[0].told(half)[1] * BLOCK * D * 4
        assert told[0]["key_bytes"] < told[1]["key_bytes"] and told[0]["value_bytes"] < told[1]["value_bytes"]


def counted(device: str) -> None:
    """The same queries again: each block comes over the bus once, and from then on it is there."""
    layer = Layer(device, v_tol="0.02")
    layer.write(numbers(device, 2, 1, K, 240, D, seed=1), 0)
    q, first = numbers(device, 1, K * G, 1, D, seed=2), None
    for step in range(3):
        counts = layer.attend(numbers(device, 2, 1, K, 1, D, seed=3 + step), q, 240 + step)[2]
        assert (counts[..., Count.KEYS] == 3).all()
        now = layer.told(), layer.told("value")
        if first is None:
            first = now
            assert first[0][0] == 0 and 3 * K <= first[0][1] <= 3 * K * G and layer.sound() == first[0][1]
            assert first[1][0] == 0 < first[1][1] == layer.sound(1)
        assert now[0] == (step * first[0][1], first[0][1])
        # A value more or less is promoted where new tokens take of the mass.
        assert layer.sound(1) == now[1][1] <= first[1][1] + 2 and now[1][0] >= step * (first[1][1] - 2)


def wide(device: str) -> None:
    """More blocks of a set than are looked at at once, and slots that are given away."""
    layer = Layer(device, ", scratch=16, value_scratch=0", policy=SPELLED.replace("3", "8"))
    tokens = 70 * BLOCK
    layer.write(numbers(device, 2, 1, K, tokens, D, seed=1), 0)
    for step in range(2):
        layer.read(numbers(device, 2, 1, K, 1, D, seed=100 + step), queries(device, 1, step, 0.5), tokens + step, 8)
        assert 0 < layer.sound() <= 16 * K
    found, fetched = layer.told()
    assert found > 0 and fetched > 16 * K, "no slot was given away"


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
def places_given(PLACE, USED, ASKED, MISSES, THEN, INDEX, before, count):
    i = tl.arange(0, 64)
    slot = tl.arange(0, 16)
    place = tl.load(PLACE + i)
    holds = place[:, None] == slot[None, :] + 1
    last = tl.max(tl.where(holds, tl.load(USED + i)[:, None], -1), 0)
    kept = tl.max((holds & (tl.load(ASKED + i) != 0)[:, None]).to(tl.int32), 0)
    turn, free = turns(last, kept)
    then, index = given(holds, place, tl.load(MISSES + i) != 0, before, turn, free, count)
    tl.store(THEN + i, then)
    tl.store(INDEX + slot, index)


def assigned(device: str) -> None:
    """Who gets which slot, against a list of slots by when they were last asked for; misses of another chunk come first or last."""
    draw = torch.Generator().manual_seed(1)
    place, used = torch.zeros(64, dtype=torch.int32), torch.zeros(64, dtype=torch.int32)
    for step in range(1, 40):
        asked = torch.rand(64, generator=draw) < (0.1 if step % 3 else 0.4)
        misses = asked & (place == 0) & (torch.rand(64, generator=draw) < 0.8)
        before, behind = torch.randint(0, 4, (2,), generator=draw).tolist() if step > 20 else (0, 0)
        then, index = (torch.zeros(size, dtype=torch.int32, device=device) for size in (64, 16))
        given_now = [x.to(device) for x in (place, used, asked.to(torch.int8), misses.to(torch.int8))]
        places_given[(1,)](*given_now, then, index, before, before + int(misses.sum()) + behind)
        held = {int(p) - 1: n for n, p in enumerate(place) if p}
        order = [s for s in range(16) if s not in held]
        order += sorted((s for s in held if not asked[held[s]]), key=lambda s: (int(used[held[s]]), s))
        wanted, blocks = place.clone(), [-1] * before + misses.nonzero().flatten().tolist() + [-1] * behind
        for n, s in zip(blocks, order, strict=False):
            if s in held:
                wanted[held[s]] = 0
            if n >= 0:
                wanted[n] = s + 1
        assert torch.equal(then.cpu(), wanted), step
        for s, n in enumerate(index.tolist()):
            assert n == -1 or (misses[n] and wanted[n] == s + 1)
        place = wanted
        used = torch.where(asked & (place > 0), step, used).to(torch.int32)


CASES: dict[str, tuple[Callable[..., None], ...]] = {
    case.__name__: (case,) for case in (assigned, counted, same_results, wide, a_stale_block_would_be_seen)
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


@pytest.mark.parametrize("scratch", [0, 16, 64])
def test_memory_announced_is_memory_allocated(scratch: int) -> None:
    scheme = schemes.parse(f"certified(tier2=host, scratch={scratch}, value_scratch={2 * scratch})")
    for role, slots in ((Role.KEY, scratch), (Role.VALUE, 2 * scratch)):
        half, slot = scheme.for_role(role), SlotSpec(K, D, torch.bfloat16, role)
        layout = half.layout(slot)
        store = Store(StoreSpec(slot, half, layout), 3, torch.device("cpu"), 5)
        assert store.nbytes == layout.nbytes(5, 3, K)
        plain = schemes.parse("certified").for_role(role).layout(slot)
        assert layout.bytes_per_page - plain.bytes_per_page == (PAGE // BLOCK * 8 if slots else 0)
        # As many blocks at every length, for each kv head of a row.
        assert layout.bytes_per_row - plain.bytes_per_row == slots * BLOCK * D * 2
        encoded = half.encode(numbers("cpu", 1, K, PAGE, D, seed=1).to(torch.bfloat16))
        assert len(encoded) == layout.encoded == 5 + (slots > 0)
        for made, spec in zip(encoded, layout.planes, strict=False):
            assert (made.dtype, made.shape[2:]) == (spec.dtype, (spec.rows, spec.width)), spec.name
        assert [spec.name for spec in layout.planes if spec.tally] == ([SCRATCH] if slots else [])
    full = schemes.parse("certified(tier2=host, values=full)").for_role(Role.VALUE).layout(SlotSpec(K, D, torch.bfloat16, Role.VALUE))
    assert PLACES not in [spec.name for spec in full.planes] and not any(spec.host for spec in full.planes)


def test_slots_are_an_option_of_the_scheme() -> None:
    made, keys, values = schemes.parse("certified(tier2=host, scratch=48)"), *(SlotSpec(K, D, torch.bfloat16, role) for role in Role)
    assert isinstance(made, Certified) and schemes.parse(made.spec()) == made
    assert (made.for_role(Role.KEY).slots(keys), made.for_role(Role.VALUE).slots(values)) == (48, 256)
    device = schemes.parse("certified(scratch=48)")
    assert isinstance(device, Certified) and device.for_role(Role.KEY).slots(keys) == 0, "nothing is copied from the device to the device"
    for bad in (1, -16, 8, 2**24, True):
        for option in ("scratch", "value_scratch"):
            with pytest.raises(BadOption):
                Certified(**{option: bad})
