"""Writing: the Python text of a choice's module, which is what Dynamo sees and what is shown of a fault."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.fuzz.expressions import BLOCK, CASTS, COUNTED, DIM, HEADS, HIDDEN, MASKS, READ, RING, SCORES, SOFTMAX, TAILS, WEIGHTS
from benchmarks.fuzz.features import Choice

ROWS = {"own-lengths", "accepted"}
"""Where each row has positions of its own, [B, n]."""


@dataclass(frozen=True)
class Text:
    """A module's ``forward``, ``sighted`` and ``visible`` as text, and the names of the arguments that all of them take."""

    source: str
    arguments: tuple[str, ...]


def heads_of(choice: Choice) -> int:
    """How many heads keys and values have."""
    return HEADS // (2 if choice["groups"] == "tiled" else int(choice["groups"]))


def _positions(choice: Choice, advance: bool) -> list[str]:
    kind, lines = choice["positions"], []
    if kind == "python-counter":
        lines = ["start = self.now", "pos = torch.arange(start, start + n, DEVICE)"] + (["self.now = start + n"] if advance else [])
    elif kind == "int":
        lines = ["pos = torch.arange(start, start + n, DEVICE)"]
    elif kind in {"counter", "late-counter"}:
        lines = ["pos = self.at + torch.arange(n, DEVICE)"] + (["self.at.add_(n)"] if advance and kind == "counter" else [])
    elif kind == "float":
        lines = ["pos = pos.to(torch.float32).long()"]
    return lines


def _cached(choice: Choice) -> tuple[list[str], str, str]:
    """Return the lines that write new tokens, and what all keys and all values then are, [B, K, T, D]."""
    layout, by_row = choice["layout"], choice["places"] in ROWS
    both = (("kc", "k"), ("vc", "v"))
    rows = "torch.arange(q.shape[0], DEVICE)[:, None]"
    lines = {
        "heads-first": [f"{c}.index_copy_(2, pos, {x})" for c, x in both],
        "tokens-first": [
            f"{c}[{rows}, pos] = {x}.transpose(1, 2)" if by_row else f"{c}.index_copy_(1, pos, {x}.transpose(1, 2))" for c, x in both
        ],
        "keys-transposed": ["kc.index_copy_(3, pos, k.transpose(2, 3))", "vc.index_copy_(2, pos, v)"],
        "assigned": [f"{c}[{rows}, :, pos] = {x}.transpose(1, 2)" if by_row else f"{c}[:, :, pos] = {x}" for c, x in both],
        "negative": [f"{c}[:, :, pos - {c}.shape[2]] = {x}" for c, x in both],
        "sliced": [f"{c}[:, :, start : start + n] = {x}" for c, x in both],
        "largest-batch": [f"{c}[: q.shape[0], :, start : start + n] = {x}" for c, x in both],
        "narrow": [f"{c}.narrow(2, start, n).copy_({x})" for c, x in both],
        "scatter": [f"{c}.scatter_(2, pos[{':, None, :, None' if by_row else ':, None'}].expand_as({x}), {x})" for c, x in both],
        "copied-back": [f"{c}.copy_({c}.index_copy(2, pos, {x}))" for c, x in both],
        "rows": [
            f"{c}[torch.arange(q.shape[0], DEVICE)[:, None, None], torch.arange({x}.shape[1], DEVICE)[None, :, None], "
            f"{'pos[:, None]' if by_row else 'pos'}] = {x}" for c, x in both
        ],
        "concatenated": [f"{c} = {x} @ self.identity if {c} is None else torch.cat([{c}, {x}], 2)" for c, x in both],
        "one-tensor": [f"kc[{i}].index_copy_(2, pos, {x})" for i, x in enumerate("kv")],
        "layers": [f"kc[1][{i}].index_copy_(2, pos, {x})" for i, x in enumerate("kv")],
        "halves": ["kc.index_copy_(2, pos, torch.cat([k, v], -1))"],
        "keys-are-values": ["kc.index_copy_(2, pos, k)"],
        "ring": [f"{c}.copy_(torch.cat([{c}, {x}], 2)[:, :, -{RING}:])" for c, x in both],
        "cross": ["if k is not None:", *(f"    {c}.copy_({x})" for c, x in both)],
        "paged": [
            f"block, offset = table.gather(1, pos // {BLOCK}), pos % {BLOCK}" if by_row
            else f"block, offset = table[:, pos // {BLOCK}], (pos % {BLOCK}).expand(q.shape[0], -1)",
            *(f"{c}[block, offset] = {x}.transpose(1, 2)" for c, x in both),
        ],
    }[layout]
    keys, values = {
        "tokens-first": ("kc.transpose(1, 2)", "vc.transpose(1, 2)"), "keys-transposed": ("kc.transpose(2, 3)", "vc"),
        "largest-batch": ("kc[: q.shape[0]]", "vc[: q.shape[0]]"), "one-tensor": ("kc[0]", "kc[1]"), "layers": ("kc[1][0]", "kc[1][1]"),
        "halves": (f"kc[..., :{DIM}]", f"kc[..., {DIM}:]"), "keys-are-values": ("kc", "kc"),
        "paged": tuple(f"{c}[table].flatten(1, 2).transpose(1, 2)" for c in ("kc", "vc")),
    }.get(layout, ("kc", "vc"))
    if choice["extent"] == "written" and layout != "concatenated":
        keys, values = f"{keys}[:, :, : start + n]", f"{values}[:, :, : start + n]"
    return lines, keys, values


def _seen(choice: Choice, given: str) -> list[str]:
    """Return the lines that define ``p``, ``t`` and ``seen`` (None where all is seen), with the mask argument that is ``given``."""
    if choice["layout"] == "cross":
        return ["seen = None"]
    places = f"torch.arange(T, DEVICE){f' + (pos[-1] + 1 - {RING})' if choice['layout'] == 'ring' else ''}"
    lines = [f"p, t = {'pos[:, None, :, None]' if choice['places'] in ROWS else 'pos[:, None]'}, {places}"]
    if given == "bool":
        return [*lines, "seen = mask"]
    if given in {"float", "float-moved"}:
        return [*lines, "seen = mask > -1e8"]
    if choice["cast"] != "none":
        lines.append(f"p, t = {CASTS[choice['cast']].replace('x', 'p', 1)}, {CASTS[choice['cast']].replace('x', 't', 1)}")
    text = {**MASKS, **COUNTED, **TAILS}[choice["mask"]]
    lines.append(f"seen = {f'({text}) & (t >= 0)' if choice['layout'] == 'ring' else text}")
    if given == "padding":
        lines.append("seen = (seen & mask[:, None, None, :T]) | (t == p)")
    return lines


def _attention(choice: Choice) -> list[str]:
    """Return the lines from ``keys``, ``values``, ``seen`` to ``out`` [B, H, n, D]."""
    lines, given = [], choice["given"]
    cross = choice["layout"] == "cross"
    if choice["memory"] == "two":
        lines += [
            "keys = torch.cat([self.k_memory.to(keys.dtype).expand(keys.shape[0], -1, -1, -1), keys], 2)",
            "values = torch.cat([self.v_memory.to(keys.dtype).expand(keys.shape[0], -1, -1, -1), values], 2)",
        ]
        if not cross:
            lines.append("seen = torch.nn.functional.pad(seen, (2, 0), value=True)")
    if choice["groups"] != "1":
        count = HEADS // heads_of(choice)
        how = f"repeat(1, {count}, 1, 1)" if choice["groups"] == "tiled" else f"repeat_interleave({count}, 1)"
        lines.append(f"keys, values = keys.{how}, values.{how}")
    bias = {"float": "mask", "float-moved": "mask"}.get(given)
    if bias and choice["memory"] == "two":
        bias = "torch.nn.functional.pad(mask, (2, 0))"
    if choice["fused"] == "sdpa":
        mask = bias or {
            "fill": "seen", "add": "torch.where(seen, 0.0, -torch.inf).to(q.dtype)",
            "add-lowest": "torch.where(seen, 0.0, torch.finfo(q.dtype).min).to(q.dtype)", "none": "None",
        }[choice["hidden"]]
        return [*lines, f"out = torch.nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask={'None' if cross else mask})"]
    einsum = choice["fused"] == "einsum"
    product = "torch.einsum('bhnd,bhtd->bhnt', q, keys)" if einsum else "q @ keys.transpose(-1, -2)"
    lines.append(f"s = {product} * {DIM**-0.5}")
    if choice["scores"] != "plain":
        lines.append(f"s = ({SCORES[choice['scores']]}).to(q.dtype)")
    if given in {"int-segments", "int-odd"}:
        ints = "torch.nn.functional.pad(mask[:, :T], (2, 0), value=1)" if choice["memory"] == "two" else "mask[:, :T]"
        lines.append(f"s = s + (1.0 - {ints}[:, None, None].to(s.dtype)) * -1e4")
    lines.append(f"h = {'s' if cross else f's + {bias}' if bias else HIDDEN[choice['hidden']]}")
    softmax = SOFTMAX[choice["softmax"]]
    if cross and "seen" in softmax:
        softmax = SOFTMAX["no-nan"]
    lines.append(f"w = {softmax}")
    if choice["weights"] != "plain":
        lines.append(f"w = {WEIGHTS[choice['weights']]}")
    lines.append("out = torch.einsum('bhnt,bhtd->bhnd', w.to(values.dtype), values)" if einsum else "out = w.to(values.dtype) @ values")
    return lines


def _body(choice: Choice) -> list[str]:
    beside, layout = choice["beside"], choice["layout"]
    single = layout in {"one-tensor", "layers", "halves", "keys-are-values"}
    caches = ["kc, vc = " + ("self.cache, None" if single else "self.k_cache, self.v_cache")] if choice["caches"] == "buffers" else []
    writes, keys, values = _cached(choice)
    lines = ["n = q.shape[2]", *caches, *_positions(choice, advance=True)]
    if beside == "before":
        lines.append("before = kc.sum()")
    if beside == "cleared":
        lines += ["if start == 0:", "    kc.zero_()"]
    lines += [*writes, f"keys, values = {keys}, {values}"]
    if beside in {"sum", "returned"}:
        lines.append("kept = keys")
    for feature in ("keys", "values"):
        if choice[feature] != "plain":
            lines.append(f"{feature} = {READ[choice[feature]].replace('x', feature)}")
    lines += ["T = keys.shape[2]", *_seen(choice, choice["given"]), *_attention(choice)]
    if beside == "sum":
        lines.append("out = out + kept.sum() * 0.001")
    if beside == "before":
        lines.append("out = out + before * 0.001")
    if beside == "alias":
        lines.append(f"out = out + self.alias[: {2 * DIM}].sum() * 0.01")
    if beside == "log-sum":
        lines.append("out = out + h.logsumexp(-1).nan_to_num(0.0, 0.0, 0.0).clamp(-20, 20)[..., None].to(out.dtype) * 0.1")
    if choice["positions"] == "late-counter":
        lines.append("self.at.add_(n)")
    more = ", kc, vc" if layout == "concatenated" else ""
    lines.append(f"return out{more or ', None, None'}, {'kept * 2' if beside == 'returned' else 'None'}")
    return lines


def _sight(choice: Choice, given: str) -> list[str]:
    """Return the lines of a function that says which keys each query sees, [.., n, T], and writes nothing."""
    if choice["layout"] == "cross":
        return ["return torch.ones(q.shape[2], 1, dtype=torch.bool, DEVICE)"]
    size = str(RING) if choice["layout"] == "ring" else "start + n" if choice["extent"] == "written" else "self.room"
    return ["n = q.shape[2]", *_positions(choice, advance=False), f"T = {size}", *_seen(choice, given), "return seen"]


def written(choice: Choice, device: str = "cpu") -> Text:
    """Return the text of a choice's module."""
    parts = {"forward": _body(choice), "sighted": _sight(choice, choice["given"]), "visible": _sight(choice, "nothing")}
    text = "\n".join(line for lines in parts.values() for line in lines)
    wanted = {
        "pos": choice["positions"] in {"argument", "float"}, "start": "start" in text and choice["positions"] != "python-counter",
        "mask": choice["given"] != "nothing", "table": choice["layout"] == "paged", "kc": choice["caches"] == "arguments",
        "vc": choice["caches"] == "arguments",
    }
    names = tuple(name for name, needed in wanted.items() if needed)
    source = "\n".join(
        f"def {name}({', '.join(('self', 'q', 'k', 'v', *names))}):\n" + "".join(f"    {line}\n" for line in lines)
        for name, lines in parts.items()
    )
    return Text(source.replace(", DEVICE", "" if device == "cpu" else f', device="{device}"'), names)
