"""The text of the prefill template: attention of many rows over encoded pages, on tensor cores that want shared memory.

Rendered by Inductor (``lower``) and by ``offline``. Symbols beyond those of ``decode.template``:

    tile of tokens  decoded once into a matrix [tokens, channels] for all BLOCK_R rows (``TileSlot``)
    whole tiles     tokens that every row of the tile of rows attends to: no mask arithmetic, no guard. They are run first
    other tiles     at the ends: mask by position, values of tokens that nobody attends to are zeroed
    up, down        one power of two for all scales that this program sees, found before the loop, and its inverse
    recent          a last loop over full-precision tokens at positions BASE + j; the planes end below BASE
    RAISED          float16 probabilities are times 2^RAISED, so is l; m is lower by as much
    output          as in ``decode.template``: DIRECT, or float32 [SPLITS, B, H, S, Dv + 2]
    CHUNK           above 0: the planes are a scratch of so many tokens, the first of which stands at position FIRST of CAPACITY.
                    hi, lo and t then count from FIRST, and the sums go on from those in the output, except at FIRST = 0
"""

# ruff: noqa: E501 - a line of the template is one line of the kernel.

from __future__ import annotations

HEADER = r"""
{%- set key, value = slots(KEY_SCHEME, VALUE_SCHEME, KEY_DIM, VALUE_DIM, KEY_WORD, VALUE_WORD, QUERY, PACKED) %}
{%- set names = ["Q", "HI", "K_WORDS", "V_WORDS"] %}
{%- if key.scaled %}{% set names = names + ["Q_SCALES", "K_SCALES"] %}{% endif %}
{%- if key.zeros %}{% set names = names + ["K_ZEROS"] %}{% endif %}
{%- if value.scaled %}{% set names = names + ["V_SCALES"] %}{% endif %}
{%- if value.zeros %}{% set names = names + ["V_ZEROS"] %}{% endif %}
{%- if HAS_LO %}{% set names = names + ["LO"] %}{% endif %}
{%- if HAS_KEEP %}{% set names = names + ["KEEP"] %}{% endif %}
{%- if HAS_RECENT %}{% set names = names + ["RECENT_K", "RECENT_V", "BASE"] %}{% endif %}
{%- if HAS_RECENT and key.scaled %}{% set names = names + ["Q_RAW"] %}{% endif %}
{%- if DIRECT and HAS_SINKS %}{% set names = names + ["SINKS"] %}{% endif %}
{%- set axes = ("o_b", "o_h", "o_s", "o_c") if DIRECT else ("o_z", "o_b", "o_h", "o_s", "o_c") %}
{%- set raised = RAISED if value.dot_type == "tl.float16" else 0 %}
{#- A tile inside one page may be loaded whole: the page is there, and what is stale in it is masked later. #}
{%- set INSIDE = PAGED and BLOCK_T <= PAGE_ROWS %}
{%- macro at(plane, view, block) %}
{%- set step = "(%s // %d)" % (stride_of(plane, 3), view) %}
{%- set page = "(%s // %d)" % (stride_of(plane, 0), view) %}
{%- if not PAGED -%}
t0.to(tl.int64) * {{step}} + tl.arange(0, BLOCK_T) * {{step}}
{%- elif INSIDE -%}
(t0 // PAGE_ROWS).to(tl.int64) * {{page}}{% if BLOCK_T < PAGE_ROWS %} + (t0 % PAGE_ROWS) // {{block}} * {{step}}{% endif %} + tl.arange(0, BLOCK_T // {{block}}) * {{step}}
{%- else -%}
(t0 // PAGE_ROWS).to(tl.int64) * {{page}} + (tl.arange(0, BLOCK_T // {{block}}) // (PAGE_ROWS // {{block}})).to(tl.int64) * {{page}} + tl.arange(0, BLOCK_T // {{block}}) % (PAGE_ROWS // {{block}}) * {{step}}
{%- endif -%}
{%- endmacro %}
{%- macro load_words(var, plane, slot, whole) %}
{%- set guard = "" if whole or (INSIDE and slot.scaled) or (INSIDE and var == "k") else ", mask=live[:, None], other=0.0" %}
{%- if slot.scaled %}
        {{var}}_words = tl.load({{var}}_base + ({{at(plane, 2, 1)}})[:, None] + tl.arange(0, {{slot.words}})[None, :]{{guard}})
{%- else %}
        {{var}}_tile = tl.load({{var}}_base + ({{at(plane, 1, 1)}})[:, None] + tl.arange(0, {{slot.dim}})[None, :] * {{stride_of(plane, 4)}}{{guard}})
{%- endif %}
{%- endmacro %}
{%- macro load_scales(var, suffix, plane, slot, whole) %}
{%- set guard = "" if whole or INSIDE else ", mask=(t0 + tl.arange(0, BLOCK_T // %d) * %d < stop)[:, None], other=0.0" % (slot.block, slot.block) %}
        {{var}}_{{suffix}} = tl.load({{var}}_{{suffix}}_base + ({{at(plane, 1, slot.block)}})[:, None] + {{0 if slot.repeated else 1}} * tl.arange(0, {{slot.width}})[None, :]{{guard}})
{%- endmacro %}
{%- macro decode(var, slot, valid) %}
{%- for line in slot.decode(var, BLOCK_T, valid) %}
        {{line}}
{%- endfor %}
{%- endmacro %}
{%- macro bases(var, plane, slot) %}
    {{var}}_base = {{plane}}_WORDS{{ ".to(tl.pointer_type(tl.uint16))" if slot.scaled }} + b * ({{stride_of(plane + "_WORDS", 1)}} // {{2 if slot.scaled else 1}}) + h * ({{stride_of(plane + "_WORDS", 2)}} // {{2 if slot.scaled else 1}})
{%- if slot.scaled %}
    {{var}}_scales_base = {{plane}}_SCALES + b * {{stride_of(plane + "_SCALES", 1)}} + h * {{stride_of(plane + "_SCALES", 2)}}
{%- endif %}
{%- if slot.zeros %}
    {{var}}_zeros_base = {{plane}}_ZEROS + b * {{stride_of(plane + "_ZEROS", 1)}} + h * {{stride_of(plane + "_ZEROS", 2)}}
{%- endif %}
{%- endmacro %}
{#- The exponent of the largest magnitude in one plane among this program's tokens; NaN and infinity do not count. #}
{%- macro largest(result, base, plane, slot) %}
{%- set row = (PAGE_ROWS // slot.block) * slot.scales %}
    top = tl.zeros([SCAN], tl.float32)
    for at in range(begin // PAGE_ROWS * {{row}}, tl.cdiv(tl.maximum(end, 0), PAGE_ROWS) * {{row}}, SCAN):
        i = at + tl.arange(0, SCAN)
        t = i // {{row}} * PAGE_ROWS + i % {{row}} // {{slot.scales}} * {{slot.block}}
        seen = (t < end) & (t + {{slot.block}} > begin)
{%- if HAS_KEEP and slot.block == 1 %}
        seen = seen & (tl.load(KEEP + b * {{stride_of("KEEP", 0) if KEEP_B else 0}} + t * {{stride_of("KEEP", 1)}}, mask=seen, other=0) != 0)
{%- endif %}
{%- set inner = "i %% %d" % row if stride_of(plane, 3)|string == slot.scales|string else "i %% %d // %d * %s + i %% %d" % (row, slot.scales, stride_of(plane, 3), slot.scales) %}
        each = tl.load({{base}} + (i // {{row}}).to(tl.int64) * {{stride_of(plane, 0)}} + {{inner}}, mask=seen, other=0.0)
        each = tl.abs(each.to(tl.float32))
        top = tl.maximum(top, tl.where(each < float("inf"), each, 0.0))
    {{result}} = (tl.max(top, 0).to(tl.int32, bitcast=True) >> 23) & 255
{%- endmacro %}
{%- macro find_up(var, plane, slot) %}
{{largest("most", var + "_scales_base", plane + "_SCALES", slot)}}
    # The largest scale becomes 2^15 of what raw codes lack, the largest zero point 2^15.
    {{var}}_exponent = {{15 - slot.powers[0] + 126}} - most
{%- if slot.zeros %}
{{largest("most", var + "_zeros_base", plane + "_ZEROS", slot)}}
    {{var}}_exponent = tl.minimum({{var}}_exponent, 141 - most)
{%- endif %}
    {{var}}_exponent = tl.minimum(tl.maximum({{var}}_exponent, {{slot.exponents[0]}}), {{slot.exponents[1]}})
    {{var}}_down = ((127 - {{var}}_exponent) << 23).to(tl.float32, bitcast=True)
{%- for line in slot.scaling(var) %}
    {{line}}
{%- endfor %}
{%- endmacro %}
"""

SOFTMAX = r"""
{#- One step from raw scores ``s``: factor is what they lack, mask (or none) is [rows, tokens]. Leaves p and alpha. #}
{%- macro softmax(factor, mask) %}
{%- if not FOLDED %}
        s = s * {{factor}}
{%- if SOFTCAP %}
        # tanh x = 1 - 2 / (exp(2x) + 1); right at both infinities.
        s = SOFTCAP - 2.0 * SOFTCAP / (tl.exp2(s * (2.0 * LOG2E / SOFTCAP)) + 1.0)
        s = s * LOG2E
{%- endif %}
{%- endif %}
{%- if mask %}
        s = tl.where({{mask}}, s, float("-inf"))
{%- endif %}
{%- set lacking = (" * " + factor) if FOLDED else "" %}
        m_new = tl.maximum(m, tl.max(s, 1){{lacking.replace("[:, None]", "")}})
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(s{{lacking}} - (m_safe - {{raised}}.0)[:, None])
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, 1)
        m = m_new
{%- endmacro %}
"""

STEP = r"""
{%- macro step(whole) %}
{%- if not whole %}
        t = t0 + tl.arange(0, BLOCK_T)
        live = (t >= start) & (t < stop)
{%- endif %}
{{- load_words("k", "K_WORDS", key, whole) }}
{%- if key.scaled %}{{ load_scales("k", "scales", "K_SCALES", key, whole) }}{% endif %}
{%- if key.zeros %}{{ load_scales("k", "zeros", "K_ZEROS", key, whole) }}{% endif %}
{%- if HAS_KEEP %}
        kept = tl.load(KEEP + b * {{stride_of("KEEP", 0) if KEEP_B else 0}} + ({{"FIRST + " if CHUNK}}t0 + tl.arange(0, BLOCK_T)) * {{stride_of("KEEP", 1)}}{{ "" if whole else ", mask=live, other=0" }}) != 0
{%- endif %}
{{- load_words("v", "V_WORDS", value, whole) }}
{%- if value.scaled %}{{ load_scales("v", "scales", "V_SCALES", value, whole) }}{% endif %}
{%- if value.zeros %}{{ load_scales("v", "zeros", "V_ZEROS", value, whole) }}{% endif %}
{%- if whole %}
{%- set valid = "kept" if HAS_KEEP else none %}
{%- else %}
        mask = (t[None, :] <= hi[:, None]){% if HAS_LO %} & (t[None, :] >= lo[:, None]){% endif %}{% if HAS_KEEP %} & kept[None, :]{% endif %}

{%- if HAS_LO %}
        valid = tl.max(mask.to(tl.int32), 0) != 0
{%- else %}
        # The row of the largest hi attends to every live token that is kept.
        valid = live{% if HAS_KEEP %} & kept{% endif %}
{%- endif %}
{%- set valid = "valid" %}
{%- endif %}
        # Both tiles are decoded before the first product: one meeting of all warps, and the groups of warps drift apart.
{%- if key.scaled %}{{ decode("k", key, none) }}{% endif %}
{%- if value.scaled %}
{{- decode("v", value, valid) }}
{%- elif valid and (HAS_LO or HAS_KEEP) %}
        v_tile = tl.where({{valid}}[:, None], v_tile, 0.0)
{%- endif %}
        s = tl.dot(q, tl.trans(k_tile))
{{- softmax("row_scale[:, None]", ("kept[None, :]" if HAS_KEEP else none) if whole else "mask") }}
        acc = tl.dot(p.to({{value.dot_type}}), v_tile, acc * alpha[:, None])
{%- endmacro %}
"""

BODY = r"""
    S = {{size_of("Q", 2)}}
    SCAN: tl.constexpr = 8192
    # The last rows of a causal mask have the most to do: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    b = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    h = (tl.program_id(1) % KV_HEADS).to(tl.int64)
    split = tl.program_id(2)
    r = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    r_ok = r < S * GROUP
    s_r = r // GROUP
    head_r = h * GROUP + r % GROUP

    # Rows beyond the last attend to nothing and hold nobody back.
    capacity = {{"CAPACITY" if CHUNK else "%s * %s" % (size_of("K_WORDS", 0), size_of("K_WORDS", 3))}}
{%- if HAS_KEEP %}
    capacity = tl.minimum(capacity, {{size_of("KEEP", 1)}})
{%- endif %}
    given = tl.load(HI + b * {{stride_of("HI", 0) if HI_B else 0}} + s_r * {{stride_of("HI", 1)}}, mask=r_ok, other=-1)
{%- if HAS_RECENT %}
    base = tl.load(BASE{% if BASE_B %} + b * {{stride_of("BASE", 0)}}{% endif %})
    hi = tl.minimum(given, tl.minimum(base, capacity) - 1).to(tl.int32)
{%- else %}
    hi = tl.minimum(given, capacity - 1).to(tl.int32)
{%- endif %}
{%- if CHUNK %}
    hi = tl.minimum(hi - FIRST, CHUNK - 1)
{%- endif %}
    stop = tl.max(hi, 0) + 1
    until = tl.min(tl.where(r_ok, hi, 2147483647), 0) + 1
{%- if HAS_LO %}
    lo = tl.maximum(tl.load(LO + b * {{stride_of("LO", 0) if LO_B else 0}} + s_r * {{stride_of("LO", 1)}}, mask=r_ok, other=2147483647), 0)
{%- if HAS_RECENT %}
    lo_given = lo
{%- endif %}
    lo = tl.minimum(lo, capacity).to(tl.int32)
{%- if CHUNK %}
    lo = tl.maximum(lo - FIRST, 0)
{%- endif %}
    start = tl.min(lo, 0)
    since = tl.max(tl.where(r_ok, lo, 0), 0)
{%- else %}
    start = 0
{%- endif %}
    first = start // BLOCK_T * BLOCK_T
    share = tl.cdiv(tl.cdiv(tl.maximum(stop - first, 0), BLOCK_T), SPLITS) * BLOCK_T
    begin = first + split * share
    end = tl.minimum(begin + share, stop)
{%- if CHUNK %}
    if (FIRST > 0) & (end <= begin):
        return
{%- endif %}
    # [begin, front) and [back, end) are masked, [front, back) is not.
{%- if HAS_LO %}
    front = tl.minimum(tl.maximum(begin, tl.cdiv(since, BLOCK_T) * BLOCK_T), tl.maximum(end, begin))
{%- else %}
    front = begin
{%- endif %}
    back = tl.maximum(front, tl.minimum(end, until) // BLOCK_T * BLOCK_T)
{{- bases("k", "K", key) }}
{{- bases("v", "V", value) }}
{%- if key.scaled %}
{{find_up("k", "K", key)}}
{%- endif %}
{%- if value.scaled %}
{{find_up("v", "V", value)}}
{%- endif %}

    column = tl.arange(0, {{key.dim}})
    q = tl.load(Q + b * {{stride_of("Q", 0)}} + (head_r * {{stride_of("Q", 1)}} + s_r * {{stride_of("Q", 2)}})[:, None] + {{key.channel("column")}}[None, :] * {{stride_of("Q", 3)}}, mask=r_ok[:, None], other=0.0)
{%- if key.scaled %}
    row_scale = tl.load(Q_SCALES + b * {{stride_of("Q_SCALES", 0)}} + head_r * {{stride_of("Q_SCALES", 1)}} + s_r * {{stride_of("Q_SCALES", 2)}}, mask=r_ok, other=1.0) * k_down * {{QK_SCALE}}
{%- else %}
    row_scale = tl.full([BLOCK_R], {{QK_SCALE}}, tl.float32)
{%- endif %}
{%- if CHUNK %}
    # What the chunks before this one left.
    later = r_ok & (FIRST > 0)
    s_long = s_r.to(tl.int64)
    m = {{load_output(("split", "b", "head_r", "s_long", value.dim|string), "later", 'float("-inf")')}} + {{raised}}.0
    l = {{load_output(("split", "b", "head_r", "s_long", (value.dim + 1)|string), "later", "0.0")}}
    acc = {{load_output(("split", "b", "head_r[:, None]", "s_long[:, None]", value.channel("tl.arange(0, %d)" % value.dim) + "[None, :]"), "later[:, None]", "0.0")}}
{%- else %}
    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, {{value.dim}}], tl.float32)
{%- endif %}

    for index in range(0, (back - front) // BLOCK_T):
        t0 = front + index * BLOCK_T
{{- step(true) }}

{%- if HAS_LO %}
    ahead = tl.cdiv(tl.maximum(front - begin, 0), BLOCK_T)
    for index in range(0, ahead + tl.cdiv(tl.maximum(end - back, 0), BLOCK_T)):
        t0 = tl.where(index < ahead, begin + index * BLOCK_T, back + (index - ahead) * BLOCK_T)
{%- else %}
    for index in range(0, tl.cdiv(tl.maximum(end - back, 0), BLOCK_T)):
        t0 = back + index * BLOCK_T
{%- endif %}
{{- step(false) }}
{%- if value.scaled %}

    acc = acc * v_down
{%- endif %}
"""

RECENT = r"""
{%- if HAS_RECENT %}

    # Row j of the recent tokens stands at position base + j; the splits share them as they share the pages.
    last = tl.minimum(given - base + 1, {{size_of("RECENT_K", 2)}})
    newest = tl.maximum(tl.max(tl.where(r_ok, last, 0), 0), 0).to(tl.int32)
{%- if CHUNK %}
    newest = tl.where(FIRST > 0, 0, newest)
{%- endif %}
    share = tl.cdiv(tl.cdiv(newest, BLOCK_T), SPLITS) * BLOCK_T
{%- if key.scaled %}
    q_recent = tl.load(Q_RAW + b * {{stride_of("Q_RAW", 0)}} + (head_r * {{stride_of("Q_RAW", 1)}} + s_r * {{stride_of("Q_RAW", 2)}})[:, None] + column[None, :] * {{stride_of("Q_RAW", 3)}}, mask=r_ok[:, None], other=0.0)
{%- else %}
    q_recent = q
{%- endif %}
    recent_scale = tl.full([BLOCK_R], {{QK_SCALE}}, tl.float32)
    out_column = tl.arange(0, {{value.dim}})
    for j0 in range(split * share, tl.minimum(split * share + share, newest), BLOCK_T):
        j = j0 + tl.arange(0, BLOCK_T)
        t = base + j
        live = (j < newest) & (t >= 0)
{%- if HAS_KEEP %}
        kept = tl.load(KEEP + b * {{stride_of("KEEP", 0) if KEEP_B else 0}} + t * {{stride_of("KEEP", 1)}}, mask=live & (t < {{size_of("KEEP", 1)}}), other=0) != 0
        live = live & kept
{%- endif %}
        k_recent = tl.load(RECENT_K + b * {{stride_of("RECENT_K", 0)}} + h * {{stride_of("RECENT_K", 1)}} + j[:, None] * {{stride_of("RECENT_K", 2)}} + column[None, :] * {{stride_of("RECENT_K", 3)}}, mask=live[:, None], other=0.0)
        s = tl.dot(q_recent, tl.trans(k_recent.to(q_recent.dtype)))
        mask = live[None, :] & (t[None, :] <= given[:, None]){% if HAS_LO %} & (t[None, :] >= lo_given[:, None]){% endif %}

        valid = tl.max(mask.to(tl.int32), 0) != 0
{{- softmax("recent_scale[:, None]", "mask") }}
        v_recent = tl.load(RECENT_V + b * {{stride_of("RECENT_V", 0)}} + h * {{stride_of("RECENT_V", 1)}} + j[:, None] * {{stride_of("RECENT_V", 2)}} + {{value.channel("out_column")}}[None, :] * {{stride_of("RECENT_V", 3)}}, mask=valid[:, None], other=0.0)
        acc = tl.dot(p.to({{"tl.%s" % QUERY.strip("'")}}), v_recent.to({{"tl.%s" % QUERY.strip("'")}}), acc * alpha[:, None])
{%- endif %}
"""

EPILOGUE = r"""
    m = m - {{raised}}.0
{%- if DIRECT %}
{%- if HAS_SINKS %}
    sink = tl.load(SINKS + head_r * {{stride_of("SINKS", 0)}}, mask=r_ok, other=float("-inf")).to(tl.float32) * LOG2E
    m_safe = tl.where(m == float("-inf"), sink, m)
    m_safe = tl.where(m_safe == float("-inf"), 0.0, m_safe)
    l = l + tl.exp2(sink - m_safe)
{%- endif %}
    # A NaN in l stays: only what had nothing to attend becomes zero.
    acc = acc * tl.where(l == 0.0, 0.0, 1.0 / l)[:, None]
{%- endif %}
    o_z = split
    o_b = b
    o_h = head_r[:, None]
    o_s = s_r[:, None].to(INDEX_DTYPE)
    o_column = tl.arange(0, {{value.dim}})
    o_c = {{value.channel("o_column")}}[None, :]
    o_ok = r_ok[:, None] & (o_c >= 0)
    {{store_output(axes, "acc", "o_ok", val_shape=("BLOCK_R", value.dim|string))}}
{%- if not DIRECT %}
    # m and l as two more channels, stored as one narrow block.
    two = tl.arange(0, 2)[None, :]
    o_val = tl.where(two == 0, m[:, None], l[:, None])
    o_c = {{value.dim}} + two
    o_ok = r_ok[:, None] & (two < 2)
    {{store_output(axes, "o_val", "o_ok", val_shape=("BLOCK_R", "2"))}}
{%- endif %}
"""

SOURCE = HEADER + SOFTMAX + STEP + "{{def_kernel(*names)}}" + BODY + RECENT + EPILOGUE
