"""The text of the one attend template: split-KV attention over encoded pages, for every scheme and mask.

Rendered by Inductor (``lower``) and, with stand-ins for Inductor's hooks, by ``offline``; what depends on
how slots are decoded is in ``template_macros``. Symbols:

    rows          (query position s, head of the group g) pairs of one kv head, r = s * GROUP + g; BLOCK_R a tile
    tokens        BLOCK_T a step; token t is row t % PAGE_ROWS of page t // PAGE_ROWS
    TOKENS_FIRST  scores are [tokens, rows] (few rows: they lie on the narrow side of the MMA) or [rows, tokens].
                  Loads have the shape that their dot takes, transposed by the pointers, so that words go to
                  shared memory asynchronously, come back as operands and unpack in registers
    key, value    ``SlotPlan``s: chunks to load, pieces to dot, scales
    norm          log2 of a token's, or tile's, largest value scale. Where values are scaled, the running maximum is that of
                  score + norm, so that p * scale is at most about one and float16 holds it whatever the scales
    split         program_id(2) of SPLITS takes its share of the tokens between min(lo) and max(hi); all that is
                  known on the device only, so an empty share writes acc = 0, m = -inf, l = 0
    HAS_RECENT    the last split attends to the newest tokens, which are not encoded, and to nothing else; the planes
                  end at BASE then
    output        DIRECT: [B, H, S, Dv], finished. Otherwise float32 [SPLITS, B, H, S, Dv + 2]: acc, m, l
                  (base-2 exponents), merged by the lowering

Nothing beyond max(hi) is loaded and nothing masked is multiplied: scores are replaced, and value rows (or
their scales) that no row of the tile attends to are zeroed, so garbage and NaN there cannot matter. Tiles that
every row attends to whole are most of them: they have a loop of their own without any of this.
"""

# ruff: noqa: E501 - a line of the template is one line of the kernel.

from __future__ import annotations

from kvcompile.lowering.decode.template_macros import MACROS, ROTATION, SCORES, VALUES

LOG2E = 1.4426950408889634

OPERANDS = r"""
{%- set names = ["Q", "HI", "K_WORDS", "V_WORDS"] %}
{%- for there, name in (
    (key.scaled, "K_SCALES"), (value.scaled, "V_SCALES"), (key.zeros, "K_ZEROS"), (value.zeros, "V_ZEROS"), (key.levels, "K_TABLE"),
    (value.levels, "V_TABLE"), (HAS_LO, "LO"), (HAS_KEEP, "KEEP"), (BIAS_KIND, "BIAS"), (DIRECT and HAS_SINKS, "SINKS"),
    (HAS_RECENT, "RECENT_K"), (HAS_RECENT, "RECENT_V"), (HAS_RECENT, "BASE"), (ROTARY_DIM, "COS"), (ROTARY_DIM, "SIN"),
) if there %}{% set _ = names.append(name) %}{% endfor %}
{%- set GUARD_VALUES = value.plain and (BIAS_KIND or HAS_KEEP or (HAS_LO and not ONE_QUERY)) %}
{#- Whether tiles that are attended to whole get their own loop. Where a token has scales of its own, the layout that masks
    bring with them is the better one; plain loads are masked by the hardware. #}
{%- set CLEAR = not (HAS_LO or HAS_KEEP or BIAS_KIND or value.by_token or value.plain) %}
"""

PROLOGUE = r"""
    S = {{size_of("Q", 2)}}
{%- if ONE_QUERY %}
    tile = tl.program_id(0)
{%- else %}
    # The last rows of a causal mask have the most to do: they start first.
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
{%- endif %}
    b = (tl.program_id(1) // KV_HEADS).to(tl.int64)
    h = (tl.program_id(1) % KV_HEADS).to(tl.int64)
    split = tl.program_id(2)
    t_i = tl.arange(0, BLOCK_T)
    r = tile * BLOCK_R + tl.arange(0, BLOCK_R)
    r_ok = r < S * GROUP
    s_r = r // GROUP
    head_r = h * GROUP + r % GROUP

    # Which tokens this tile may attend to at all, and this split's share of them.
    capacity = {{size_of("K_WORDS", 0)}} * {{size_of("K_WORDS", 3)}}
{%- if HAS_KEEP %}
    capacity = tl.minimum(capacity, {{size_of("KEEP", 1)}})
{%- endif %}
{%- if BIAS_KIND %}
    capacity = tl.minimum(capacity, {{size_of("BIAS", 3)}})
{%- endif %}
{%- if ONE_QUERY %}
    hi = tl.load(HI + b * {{stride_of("HI", 0) if HI_B else 0}})
    hi = tl.minimum(hi, capacity - 1).to(tl.int32)
    stop = hi + 1
{%- else %}
    hi = tl.load(HI + b * {{stride_of("HI", 0) if HI_B else 0}} + s_r * {{stride_of("HI", 1)}}, mask=r_ok, other=-1)
    hi = tl.minimum(hi, capacity - 1).to(tl.int32)
    stop = tl.max(hi, 0) + 1
{%- endif %}
{%- if HAS_LO and ONE_QUERY %}
    lo = tl.maximum(tl.load(LO + b * {{stride_of("LO", 0) if LO_B else 0}}), 0)
    lo = tl.minimum(lo, capacity).to(tl.int32)
    start = lo
{%- elif HAS_LO %}
    lo = tl.maximum(tl.load(LO + b * {{stride_of("LO", 0) if LO_B else 0}} + s_r * {{stride_of("LO", 1)}}, mask=r_ok, other=2147483647), 0)
    lo = tl.minimum(lo, capacity).to(tl.int32)
    start = tl.min(lo, 0)
{%- else %}
    start = 0
{%- endif %}
    first = start // BLOCK_T * BLOCK_T
{%- if HAS_RECENT %}
    # Positions fit 32 bits; a base far below zero is as good as one just below it.
    visible = stop
    base = tl.maximum(tl.load(BASE + b * {{stride_of("BASE", 0) if BASE_B else 0}}), -1073741824).to(tl.int32)
    stop = tl.maximum(tl.minimum(stop, base), first)
{%- endif %}
    share = tl.cdiv(tl.cdiv(tl.maximum(stop - first, 0), BLOCK_T), SPLITS - HAS_RECENT) * BLOCK_T
{%- if SHARES %}
    # Rows differ in length: programs get what a row of average length gives each of SHARES, unless this row has too few for it.
    tiles = 0
    for other in range(0, {{size_of("Q", 0)}}, 32):
        rows = (other + tl.arange(0, 32)).to(tl.int64)
        there = rows < {{size_of("Q", 0)}}
        until = tl.minimum(tl.load(HI + rows * {{stride_of("HI", 0) if HI_B else 0}}, mask=there, other=-1), capacity - 1) + 1
{%- if HAS_LO %}
        since = tl.minimum(tl.maximum(tl.load(LO + rows * {{stride_of("LO", 0) if LO_B else 0}}, mask=there, other=0), 0), capacity)
{%- else %}
        since = 0
{%- endif %}
{%- if HAS_RECENT %}
        until = tl.minimum(until, tl.load(BASE + rows * {{stride_of("BASE", 0) if BASE_B else 0}}, mask=there, other=0))
{%- endif %}
        tiles += tl.sum(tl.cdiv(tl.where(there, tl.maximum(until - since, 0), 0).to(tl.int32), BLOCK_T), 0)
    share = tl.maximum(share, tl.cdiv(tiles, SHARES * {{size_of("Q", 0)}}).to(tl.int32) * BLOCK_T)
{%- endif %}
    begin = first + split * share
    end = tl.minimum(begin + share, stop)

    # Queries, cut the way the keys are; in float16 only after each row was brought to at most one by a power
    # of two, so nothing overflows and what underflows is below 2^-24 of the row's largest element.
    q_base = Q + b * {{stride_of("Q", 0)}} + head_r * {{stride_of("Q", 1)}} + s_r * {{stride_of("Q", 2)}}
{%- if key.folded and PACKED %}
    r_in = tl.minimum(r, S * GROUP - 1)
    q_inside = Q + b * {{stride_of("Q", 0)}} + (h * GROUP + r_in % GROUP) * {{stride_of("Q", 1)}} + (r_in // GROUP) * {{stride_of("Q", 2)}}
{%- endif %}
{%- for piece in key.pieces %}
{%- set columns = "tl.arange(0, %d)" % piece.chunk.block %}
{%- set at = "(%d + %d * %s)" % (piece.first, piece.step, columns) %}
{%- if key.folded and PACKED %}
    q_{{piece.name}} = tl.inline_asm_elementwise("ld.global.nc.b16 $0, [$1];", "=h,l", [(q_inside[None, :] + tl.minimum({{at}}, KEY_DIM - 1)[:, None] * {{stride_of("Q", 3)}}).to(tl.int64)], dtype={{MODEL_TYPE}}, is_pure=True, pack=1)
{%- if piece.chunk.padded %}
    q_{{piece.name}} = tl.where(({{columns}} < {{piece.chunk.count}})[:, None], q_{{piece.name}}, 0.0)
{%- endif %}
{%- elif TOKENS_FIRST %}
    q_{{piece.name}} = tl.load(q_base[None, :] + {{at}}[:, None] * {{stride_of("Q", 3)}}, mask=r_ok[None, :]{% if piece.chunk.padded %} & ({{columns}} < {{piece.chunk.count}})[:, None]{% endif %}, other=0.0)
{%- else %}
    q_{{piece.name}} = tl.load(q_base[:, None] + {{at}}[None, :] * {{stride_of("Q", 3)}}, mask=r_ok[:, None]{% if piece.chunk.padded %} & ({{columns}} < {{piece.chunk.count}})[None, :]{% endif %}, other=0.0)
{%- endif %}
{%- if ROTARY_DIM %}
{{load_turned("turned_" + piece.name, piece.first, piece.step, piece.chunk.count, piece.block)}}
    turned_{{piece.name}} = turned_{{piece.name}}.to({{key.dot_type}})
{%- endif %}
{%- endfor %}
    row_scale = tl.full([BLOCK_R], {{QK_SCALE * 2.0 ** key.power}}, tl.float32)
{%- if key.normalize %}
    top_q = tl.zeros([BLOCK_R], tl.float32)
{%- for block, pieces in key.pieces|groupby("block") %}
    # Elementwise over pieces first: one reduction across lanes instead of many.
    top = tl.abs(q_{{pieces[0].name}}.to(tl.float32))
{%- for piece in pieces[1:] %}
    top = tl.maximum(top, tl.abs(q_{{piece.name}}.to(tl.float32)))
{%- endfor %}
    top_q = tl.maximum(top_q, tl.max(top, {{T_AXIS}}))
{%- endfor %}
    # The exponent field of the largest element, kept away from zero and infinity.
    exponent = tl.minimum(tl.maximum((top_q.to(tl.int32, bitcast=True) >> 23) & 255, 4), 250)
    row_scale = row_scale * ((exponent + 1) << 23).to(tl.float32, bitcast=True)
    shrink = ((253 - exponent) << 23).to(tl.float32, bitcast=True)
{%- for piece in key.pieces %}
    q_{{piece.name}} = q_{{piece.name}}.to(tl.float32) * shrink{{ "[None, :]" if TOKENS_FIRST else "[:, None]" }}
{%- endfor %}
{%- endif %}
{%- for piece in key.pieces %}
{%- set octaves = key.lowered(piece) if key.folded else key.power - piece.power %}
    q_{{piece.name}} = {% if octaves %}(q_{{piece.name}} * {{2.0 ** -octaves}}){% else %}q_{{piece.name}}{% endif %}.to({{key.dot_type}})
{%- endfor %}
{%- if key.tabled %}
    # What each scale's zero points are multiplied by.
{%- for i in range(key.scales) %}
    sum_{{i}} = tl.zeros([BLOCK_R], tl.float32)
{%- for block, pieces in key.of_scale(i)|groupby("block") %}
    sum_{{i}} += tl.sum({% for piece in pieces %}{{ " + " if not loop.first }}q_{{piece.name}}.to(tl.float32){% endfor %}, {{T_AXIS}})
{%- endfor %}
{%- endfor %}
{%- endif %}
{%- if key.offset %}
    # What the keys' offset adds to each scale's sub-dots.
{%- for i in range(key.scales) %}
    excess_{{i}} = tl.zeros([BLOCK_R], tl.float32)
{%- for block, pieces in key.of_scale(i)|groupby("block") %}
    sum_q = {% for piece in pieces %}{{ " + " if not loop.first }}q_{{piece.name}}.to(tl.float32) * {{key.offset * 2.0 ** -piece.power}}{% endfor %}

    excess_{{i}} += tl.sum(sum_q, {{T_AXIS}})
{%- endfor %}
{%- endfor %}
{%- endif %}
"""

STEP = r"""
{%- macro finish_scores() %}
{%- if SOFTCAP %}
        # tanh x = 1 - 2 / (exp(2x) + 1); right at both infinities.
        scores = SOFTCAP - 2.0 * SOFTCAP / (tl.exp2(scores * (2.0 * LOG2E / SOFTCAP)) + 1.0)
        scores = scores * LOG2E
{%- endif %}
{%- endmacro %}
{%- macro load_kept() %}
{%- if HAS_KEEP %}
        kept = tl.load(KEEP + b * {{stride_of("KEEP", 0) if KEEP_B else 0}} + t * {{stride_of("KEEP", 1)}}, mask=live, other=0) != 0
{%- endif %}
{%- endmacro %}
{%- macro mask_scores() %}
{%- if ONE_QUERY %}
        valid = live{% if HAS_KEEP %} & kept{% endif %}

        mask = {{tok("valid")}}
{%- else %}
        mask = {{tok("t")}} <= {{row("hi")}}
{%- if HAS_RECENT %}
        mask = mask & {{tok("live")}}
{%- endif %}
{%- if HAS_LO %}
        mask = mask & ({{tok("t")}} >= {{row("lo")}})
{%- endif %}
{%- if HAS_KEEP %}
        mask = mask & {{tok("kept")}}
{%- endif %}
{%- endif %}
{%- if BIAS_KIND %}
        b_at = BIAS + b * {{stride_of("BIAS", 0) if BIAS_B else 0}} + {{row("(head_r * %s + s_r * %s)" % (stride_of("BIAS", 1) if BIAS_H else 0, stride_of("BIAS", 2) if BIAS_S else 0))}} + {{tok("t")}} * {{stride_of("BIAS", 3)}}
        b_in = {{tok("live")}} & {{row("r_ok")}}
{%- if BIAS_KIND == 2 %}
        mask = mask & (tl.load(b_at, mask=b_in, other=0) != 0)
{%- else %}
        scores = scores + tl.load(b_at, mask=b_in, other=float("-inf")).to(tl.float32) * LOG2E
{%- endif %}
{%- endif %}
        scores = tl.where(mask, scores, float("-inf"))
{%- if BIAS_KIND or (HAS_LO and not ONE_QUERY) %}
        valid = tl.max((mask & {{row("r_ok")}}).to(tl.int32), {{R_AXIS}}) != 0
{%- elif not ONE_QUERY %}
        # The row of the largest hi attends to every live token that is kept.
        valid = live{% if HAS_KEEP %} & kept{% endif %}
{%- endif %}
{%- endmacro %}
{%- macro tile_step(full) %}
        t0 = begin + step * BLOCK_T
        t = t0 + t_i
{%- if not full or ROTARY_DIM %}
        live = (t < stop){% if HAS_LO and ONE_QUERY %} & (t >= lo){% endif %}
{%- endif %}

{{- load_keys(full) }}
{{- load_kept() }}
{{- load_values(full) }}

{%- if key.folded %}
{{- folded_scores() }}
{%- elif key.elements %}
{{- element_scores(full) }}
{%- else %}
{{- token_scores() }}
{%- endif %}
{{- finish_scores() }}
{%- if not full %}
{{- mask_scores() }}
{%- endif %}
{{- add_values(full) }}
{%- endmacro %}
"""

LOOP = r"""
{{planes_of("k", "K", key, 2 if key.folded else 1 if key.elements else KEY_SCALE_PACK)}}
{{planes_of("v", "V", value, 1 if value.elements else VALUE_SCALE_PACK)}}

    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_R], tl.float32)
{%- for piece in value.pieces %}
    acc_{{piece.name}} = tl.zeros([{{ "%d, BLOCK_R" % piece.chunk.block if TOKENS_FIRST else "BLOCK_R, %d" % piece.chunk.block }}], tl.float32)
{%- endfor %}
{%- if CLEAR %}

    clear = {% if ONE_QUERY %}end{% else %}tl.minimum(tl.min(tl.where(r_ok, hi, 2147483646), 0) + 1, end){% endif %}

    clear_steps = tl.maximum(clear - begin, 0) // BLOCK_T
    for step in range(0, clear_steps):
{{- tile_step(true) }}
    begin += clear_steps * BLOCK_T
{%- endif %}

    for step in {{ "tl.range(0, tl.cdiv(tl.maximum(end - begin, 0), BLOCK_T), num_stages=1)" if CLEAR else "range(0, tl.cdiv(tl.maximum(end - begin, 0), BLOCK_T))" }}:
{{- tile_step(false) }}
{%- if value.shifted %}
    m = m - 14.0
{%- endif %}
"""

EPILOGUE = r"""
{%- if DIRECT %}
{%- if HAS_SINKS %}
    sink = tl.load(SINKS + head_r * {{stride_of("SINKS", 0)}}, mask=r_ok, other=float("-inf")).to(tl.float32) * LOG2E
    m_safe = tl.where(m == float("-inf"), sink, m)
    m_safe = tl.where(m_safe == float("-inf"), 0.0, m_safe)
    l = l + tl.exp2(sink - m_safe)
{%- endif %}
    # A NaN in l stays: only what had nothing to attend becomes zero.
    inverse = tl.where(l == 0.0, 0.0, 1.0 / l)
{%- endif %}
    # The split of the newest tokens writes its own.
    o_row = r_ok{% if HAS_RECENT %} & (split < SPLITS - 1){% endif %}

    o_z = split
    o_b = b
    o_h = {{row("head_r")}}
    o_s = {{row("s_r")}}.to(INDEX_DTYPE)
{%- for piece in value.pieces %}
{%- set columns = "tl.arange(0, %d)" % piece.chunk.block %}
    o_c = {{channel("(%d + %d * %s)" % (piece.first, piece.step, columns))}}
    o_ok = {{row("o_row")}}{% if piece.chunk.padded %} & {{channel("(%s < %d)" % (columns, piece.chunk.count))}}{% else %} & (o_c >= 0){% endif %}

    o_val = acc_{{piece.name}}{% if piece.power %} * {{2.0 ** (piece.power - (14 if value.lifted or value.decode.name == 'SHIFTED' else 0))}}{% endif %}{% if DIRECT %} * {{row("inverse")}}{% endif %}

{%- set shape = (piece.chunk.block|string, "BLOCK_R") if TOKENS_FIRST else ("BLOCK_R", piece.chunk.block|string) %}
    {{store_output(axes, "o_val", "o_ok", val_shape=shape)}}
{%- endfor %}
{%- if not DIRECT %}
    # m and l as two more channels, stored as one narrow block.
    two = {{channel("tl.arange(0, 2)")}}
    o_val = tl.where(two == 0, {{row("m")}}, {{row("l")}})
    o_c = {{value.dim}} + two
    o_ok = {{row("o_row")}} & (two < 2)
    {{store_output(axes, "o_val", "o_ok", val_shape=("2", "BLOCK_R") if TOKENS_FIRST else ("BLOCK_R", "2"))}}
{%- endif %}
"""

RECENT = r"""
{%- if HAS_RECENT %}
    if split == SPLITS - 1:
        rows = {{size_of("RECENT_K", 2)}}
        raw_q = Q + b * {{stride_of("Q", 0)}} + head_r * {{stride_of("Q", 1)}} + s_r * {{stride_of("Q", 2)}}
        rk_base = RECENT_K + b * {{stride_of("RECENT_K", 0)}} + h * {{stride_of("RECENT_K", 1)}}
        rv_base = RECENT_V + b * {{stride_of("RECENT_V", 0)}} + h * {{stride_of("RECENT_V", 1)}}
        m = tl.full([BLOCK_R], float("-inf"), tl.float32)
        l = tl.zeros([BLOCK_R], tl.float32)
{%- for run in value.runs %}
        sum_{{run.name}} = tl.zeros([{{ "%d, BLOCK_R" % run.block if TOKENS_FIRST else "BLOCK_R, %d" % run.block }}], tl.float32)
{%- endfor %}
{%- for run in key.runs %}
{%- set column = "tl.arange(0, %d)" % run.block %}
{%- set inside = " & (%s < %d)%s" % (column, run.count, "[:, None]" if TOKENS_FIRST else "[None, :]") if run.padded else "" %}
        raw_{{run.name}} = tl.load({{row("raw_q")}} + {{channel("((%d + %s) * %s)" % (run.first, column, stride_of("Q", 3)))}}, mask={{row("r_ok")}}{{inside}}, other=0.0)
{%- if ROTARY_DIM %}
{%- filter indent(4, first=true) %}
{{load_turned("raw_turned_" + run.name, run.first, 1, run.count, run.block)}}
{%- endfilter %}
{%- endif %}
{%- endfor %}
        for step in tl.range(0, tl.cdiv(tl.minimum(tl.maximum(visible - base, 0), rows), BLOCK_N), num_stages=2):
{%- filter indent(4) %}
        j = step * BLOCK_N + tl.arange(0, BLOCK_N)
        t = base + j
        live = (j < rows) & (t >= 0) & (t < visible){% if HAS_LO and ONE_QUERY %} & (t >= lo){% endif %}

{{- load_kept() }}
{%- for run in key.runs %}
{%- set column = "tl.arange(0, %d)" % run.block %}
{%- set inside = " & " + row("(%s < %d)" % (column, run.count)) if run.padded else "" %}
        element = tl.load(rk_base + {{tok("(j * %s)" % stride_of("RECENT_K", 2))}} + {{row("((%d + %s) * %s)" % (run.first, column, stride_of("RECENT_K", 3)))}}, mask={{tok("live")}}{{inside}}, other=0.0)
{%- if ROTARY_DIM %}
        element = element.to(tl.float32)
{{- rotated_dot(run.first, 1, run.count, run.block, "raw_" + run.name, "raw_turned_" + run.name, MODEL_TYPE, not loop.first) }}
{%- else %}
        element = element.to({{MODEL_TYPE}})
        part = tl.dot({{ "element, raw_" + run.name if TOKENS_FIRST else "raw_%s, element" % run.name }}{% if not loop.first %}, part{% endif %}{{PRECISION}})
{%- endif %}
{%- endfor %}
        scores = part * QK_SCALE
{{- finish_scores() }}
{{- mask_scores() }}
        m_new = tl.maximum(m, tl.max(scores, {{T_AXIS}}))
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(scores - {{row("m_safe")}})
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, {{T_AXIS}})
        m = m_new
        weight = p.to({{MODEL_TYPE}})
{%- for run in value.runs %}
{%- set column = "tl.arange(0, %d)" % run.block %}
        element = tl.load(rv_base + {{row("(j * %s)" % stride_of("RECENT_V", 2))}} + {{channel("((%d + %s) * %s)" % (run.first, column, stride_of("RECENT_V", 3)))}}, mask={{row("valid")}}{% if run.padded %} & {{channel("(%s < %d)" % (column, run.count))}}{% endif %}, other=0.0).to({{MODEL_TYPE}})
        sum_{{run.name}} = tl.dot({{ "element, weight, sum_%s * alpha[None, :]" % run.name if TOKENS_FIRST else "weight, element, sum_%s * alpha[:, None]" % run.name }}{{PRECISION}})
{%- endfor %}
{%- endfilter %}
        o_z = split
        o_b = b
        o_h = {{row("head_r")}}
        o_s = {{row("s_r")}}.to(INDEX_DTYPE)
{%- for run in value.runs %}
        o_c = {{channel("(%d + tl.arange(0, %d))" % (run.first, run.block))}}
        o_ok = {{row("r_ok")}} & {{channel("(tl.arange(0, %d) < %d)" % (run.block, run.count))}}
        o_val = sum_{{run.name}}
{%- set shape = (run.block|string, "BLOCK_R") if TOKENS_FIRST else ("BLOCK_R", run.block|string) %}
        {{store_output(axes, "o_val", "o_ok", indent_width=8, val_shape=shape)}}
{%- endfor %}
        two = {{channel("tl.arange(0, 2)")}}
        o_val = tl.where(two == 0, {{row("m")}}, {{row("l")}})
        o_c = {{value.dim}} + two
        o_ok = {{row("r_ok")}} & (two < 2)
        {{store_output(axes, "o_val", "o_ok", indent_width=8, val_shape=("2", "BLOCK_R") if TOKENS_FIRST else ("BLOCK_R", "2"))}}
{%- endif %}
"""

PLANS = r"""
{%- set key, value = plans(KEY_SCHEME, VALUE_SCHEME, KEY_DIM, VALUE_DIM, KEY_WORD, VALUE_WORD, QUERY, WIDE_KEYS, WIDE_VALUES, PACKED, KEY_GENERIC, VALUE_GENERIC, TALL) %}
"""

SOURCE = PLANS + OPERANDS + MACROS + ROTATION + SCORES + VALUES + STEP + "{{def_kernel(*names)}}" + PROLOGUE + LOOP + EPILOGUE + RECENT
