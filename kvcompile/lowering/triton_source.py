"""The text of the one attend template: split-KV attention over encoded pages, for every scheme and mask.

Rendered by Inductor (``triton_attend``) and, with stand-ins for Inductor's hooks, by ``offline``. Symbols:

    rows          (query position s, head of the group g) pairs of one kv head, r = s * GROUP + g; BLOCK_R a tile
    tokens        BLOCK_T a step; token t is row t % PAGE_ROWS of page t // PAGE_ROWS
    TOKENS_FIRST  scores are [tokens, rows] (few rows: they lie on the narrow side of the MMA) or [rows, tokens].
                  Loads have the shape that their dot takes, transposed by the pointers, so that words go to
                  shared memory asynchronously, come back as operands and unpack in registers
    key, value    ``SlotPlan``s: chunks to load, pieces to dot, scales
    norm          log2 of a token's largest value scale. Where values are scaled, the running maximum is that of
                  score + norm, so that p * scale is at most about one and float16 holds it whatever the scales
    split         program_id(2) of SPLITS takes its share of the tokens between min(lo) and max(hi); all that is
                  known on the device only, so an empty share writes acc = 0, m = -inf, l = 0
    output        DIRECT: [B, H, S, Dv], finished. Otherwise float32 [SPLITS, B, H, S, Dv + 2]: acc, m, l
                  (base-2 exponents), merged by the lowering

Nothing beyond max(hi) is loaded and nothing masked is multiplied: scores are replaced, and value rows (or
their scales) that no row of the tile attends to are zeroed, so garbage and NaN there cannot matter.
"""

# ruff: noqa: E501 - a line of the template is one line of the kernel.

from __future__ import annotations

LOG2E = 1.4426950408889634

OPERANDS = r"""
{%- set names = ["Q", "HI", "K_WORDS", "V_WORDS"] %}
{%- if key.scaled %}{% set names = names + ["K_SCALES"] %}{% endif %}
{%- if value.scaled %}{% set names = names + ["V_SCALES"] %}{% endif %}
{%- if HAS_LO %}{% set names = names + ["LO"] %}{% endif %}
{%- if HAS_KEEP %}{% set names = names + ["KEEP"] %}{% endif %}
{%- if BIAS_KIND %}{% set names = names + ["BIAS"] %}{% endif %}
{%- if DIRECT and HAS_SINKS %}{% set names = names + ["SINKS"] %}{% endif %}
"""

MACROS = r"""
{%- macro tok(x) %}{{x}}{{ "[:, None]" if TOKENS_FIRST else "[None, :]" }}{% endmacro %}
{%- macro row(x) %}{{x}}{{ "[None, :]" if TOKENS_FIRST else "[:, None]" }}{% endmacro %}
{%- macro channel(x) %}{{tok(x)}}{% endmacro %}
{%- set axes = ("o_b", "o_h", "o_s", "o_c") if DIRECT else ("o_z", "o_b", "o_h", "o_s", "o_c") %}
{%- set GUARD_VALUES = not value.scaled and (BIAS_KIND or HAS_KEEP or (HAS_LO and not ONE_QUERY)) %}
{#- A tile inside one page may be loaded whole: the page is there, and what is stale in it is masked later,
    except values that are not scaled (0 * NaN). #}
{%- set WHOLE = PAGED and BLOCK_T <= PAGE_ROWS %}
{%- set T_AXIS = 0 if TOKENS_FIRST else 1 %}
{%- set R_AXIS = 1 - T_AXIS %}
{%- set PRECISION = ', input_precision="ieee"' %}
{%- macro page(plane, view) %}
{%- if not PAGED -%}
t0.to(tl.int64) * ({{stride(plane, 3)}} // {{view}})
{%- elif BLOCK_T <= PAGE_ROWS -%}
(t0 // PAGE_ROWS).to(tl.int64) * ({{stride(plane, 0)}} // {{view}}) + (t0 % PAGE_ROWS) * ({{stride(plane, 3)}} // {{view}})
{%- else -%}
(t0 // PAGE_ROWS).to(tl.int64) * ({{stride(plane, 0)}} // {{view}})
{%- endif -%}
{%- endmacro %}
{%- macro rows_of(plane, view) %}
{%- if PAGED and BLOCK_T > PAGE_ROWS -%}
(t_i // PAGE_ROWS).to(tl.int64) * ({{stride(plane, 0)}} // {{view}}) + (t_i % PAGE_ROWS) * ({{stride(plane, 3)}} // {{view}})
{%- else -%}
t_i * ({{stride(plane, 3)}} // {{view}})
{%- endif -%}
{%- endmacro %}
{%- macro plane(var, name, view, recast) %}
    {{var}} = {{name}}{{ ".to(tl.pointer_type(%s))" % recast if recast else "" }} + b * ({{stride(name, 1)}} // {{view}}) + h * ({{stride(name, 2)}} // {{view}})
    {{var}}_t = {{rows_of(name, view)}}
{%- endmacro %}
{%- macro load_scales(var, base, name, plan, pack) %}
{%- set mask = "" if WHOLE else ", mask=live, other=0.0" %}
{%- if pack > 1 %}
        {{var}}_all = tl.load({{base}} + ({{page(name, pack)}}) + {{base}}_t{{ mask.replace("0.0", "0") }})
{%- for i in range(plan.scales) %}
        {{var}}_{{i}} = ({{var}}_all{% if i %} >> {{16 * i}}{% endif %}).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
{%- endfor %}
{%- else %}
{%- for i in range(plan.scales) %}
        {{var}}_{{i}} = tl.load({{base}} + ({{page(name, 1)}}) + {{base}}_t{% if plan.scales > 1 %} + {{i}} * {{stride(name, 4)}}{% endif %}{{mask}}).to(tl.float32)
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- macro load_chunk(var, base, name, plan, chunk, channels_first) %}
{%- set token = "[None, :]" if channels_first else "[:, None]" %}
{%- set column = "[:, None]" if channels_first else "[None, :]" %}
{%- set whole = WHOLE and (plan.scaled or var == "k") %}
{%- set inside = "(tl.arange(0, %d) < %d)%s" % (chunk.block, chunk.count, column) %}
{%- set terms = ([] if whole else ["live" + token]) + ([inside] if chunk.padded else []) %}
{%- set mask = "mask=%s, other=0" % " & ".join(terms) if terms else "" %}
        {{var}}_{{chunk.name}} = tl.load({{base}} + ({{page(name, plan.words_per_view)}}) + {{base}}_t{{token}} + ({{chunk.first}} + tl.arange(0, {{chunk.block}})){{column}}{% if plan.words_per_view == 1 %} * {{stride(name, 4)}}{% endif %}, {{mask}})
{%- endmacro %}
"""

PROLOGUE = r"""
    S = {{size("Q", 2)}}
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
    capacity = {{size("K_WORDS", 0)}} * {{size("K_WORDS", 3)}}
{%- if HAS_KEEP %}
    capacity = tl.minimum(capacity, {{size("KEEP", 1)}})
{%- endif %}
{%- if BIAS_KIND %}
    capacity = tl.minimum(capacity, {{size("BIAS", 3)}})
{%- endif %}
{%- if ONE_QUERY %}
    hi = tl.load(HI + b * {{stride("HI", 0) if HI_B else 0}})
    hi = tl.minimum(hi, capacity - 1).to(tl.int32)
    stop = hi + 1
{%- else %}
    hi = tl.load(HI + b * {{stride("HI", 0) if HI_B else 0}} + s_r * {{stride("HI", 1)}}, mask=r_ok, other=-1)
    hi = tl.minimum(hi, capacity - 1).to(tl.int32)
    stop = tl.max(hi, 0) + 1
{%- endif %}
{%- if HAS_LO and ONE_QUERY %}
    lo = tl.maximum(tl.load(LO + b * {{stride("LO", 0) if LO_B else 0}}), 0)
    lo = tl.minimum(lo, capacity).to(tl.int32)
    start = lo
{%- elif HAS_LO %}
    lo = tl.maximum(tl.load(LO + b * {{stride("LO", 0) if LO_B else 0}} + s_r * {{stride("LO", 1)}}, mask=r_ok, other=2147483647), 0)
    lo = tl.minimum(lo, capacity).to(tl.int32)
    start = tl.min(lo, 0)
{%- else %}
    start = 0
{%- endif %}
    first = start // BLOCK_T * BLOCK_T
    share = tl.cdiv(tl.cdiv(tl.maximum(stop - first, 0), BLOCK_T), SPLITS) * BLOCK_T
    begin = first + split * share
    end = tl.minimum(begin + share, stop)

    # Queries, cut the way the keys are; in float16 only after each row was brought to at most one by a power
    # of two, so nothing overflows and what underflows is below 2^-24 of the row's largest element.
    q_base = Q + b * {{stride("Q", 0)}} + head_r * {{stride("Q", 1)}} + s_r * {{stride("Q", 2)}}
{%- for piece in key.pieces %}
{%- set columns = "tl.arange(0, %d)" % piece.chunk.block %}
{%- set at = "(%d + %d * %s)" % (piece.first, piece.step, columns) %}
{%- if TOKENS_FIRST %}
    q_{{piece.name}} = tl.load(q_base[None, :] + {{at}}[:, None] * {{stride("Q", 3)}}, mask=r_ok[None, :]{% if piece.chunk.padded %} & ({{columns}} < {{piece.chunk.count}})[:, None]{% endif %}, other=0.0)
{%- else %}
    q_{{piece.name}} = tl.load(q_base[:, None] + {{at}}[None, :] * {{stride("Q", 3)}}, mask=r_ok[:, None]{% if piece.chunk.padded %} & ({{columns}} < {{piece.chunk.count}})[None, :]{% endif %}, other=0.0)
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
    q_{{piece.name}} = {% if piece.power != key.power %}(q_{{piece.name}} * {{2.0 ** (piece.power - key.power)}}){% else %}q_{{piece.name}}{% endif %}.to({{key.dot_type}})
{%- endfor %}
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

LOOP = r"""
{{plane("k_base", "K_WORDS", key.words_per_view, "tl.uint16" if key.words_per_view == 2 else none)}}
{{plane("v_base", "V_WORDS", value.words_per_view, "tl.uint16" if value.words_per_view == 2 else none)}}
{%- if key.scaled %}
{{plane("ks_base", "K_SCALES", KEY_SCALE_PACK, "tl.uint%d" % (16 * KEY_SCALE_PACK) if KEY_SCALE_PACK > 1 else none)}}
{%- endif %}
{%- if value.scaled %}
{{plane("vs_base", "V_SCALES", VALUE_SCALE_PACK, "tl.uint%d" % (16 * VALUE_SCALE_PACK) if VALUE_SCALE_PACK > 1 else none)}}
{%- endif %}

    m = tl.full([BLOCK_R], float("-inf"), tl.float32)
    l = tl.zeros([BLOCK_R], tl.float32)
{%- for piece in value.pieces %}
    acc_{{piece.name}} = tl.zeros([{{ "%d, BLOCK_R" % piece.chunk.block if TOKENS_FIRST else "BLOCK_R, %d" % piece.chunk.block }}], tl.float32)
{%- endfor %}

    for step in range(0, tl.cdiv(tl.maximum(end - begin, 0), BLOCK_T)):
        t0 = begin + step * BLOCK_T
        t = t0 + t_i
        live = (t < stop){% if HAS_LO and ONE_QUERY %} & (t >= lo){% endif %}

{%- for chunk in key.chunks %}
{{- load_chunk("k", "k_base", "K_WORDS", key, chunk, not TOKENS_FIRST) }}
{%- endfor %}
{%- if key.scaled %}{{ load_scales("ks", "ks_base", "K_SCALES", key, KEY_SCALE_PACK) }}{% endif %}
{%- if HAS_KEEP %}
        kept = tl.load(KEEP + b * {{stride("KEEP", 0) if KEEP_B else 0}} + t * {{stride("KEEP", 1)}}, mask=live, other=0) != 0
{%- endif %}
{%- for chunk in value.chunks %}
{{- load_chunk("v", "v_base", "V_WORDS", value, chunk, TOKENS_FIRST) }}
{%- endfor %}
{%- if value.scaled %}{{ load_scales("vs", "vs_base", "V_SCALES", value, VALUE_SCALE_PACK) }}{% endif %}

{%- for i in range(key.scales) %}
{%- set outer = loop %}
{%- for piece in key.of_scale(i) %}
{%- set unpacked = piece.unpack("k_" + piece.chunk.name) %}
        part = tl.dot({{ "%s, q_%s" % (unpacked, piece.name) if TOKENS_FIRST else "q_%s, %s" % (piece.name, unpacked) }}{% if not loop.first %}, part{% endif %}{{PRECISION}})
{%- endfor %}
{%- if key.scaled %}
{%- if key.offset %}
        part = part - {{row("excess_%d" % i)}}
{%- endif %}
        scores = part * {{tok("ks_%d" % i)}}{% if not outer.first %} + scores{% endif %}
{%- else %}
        scores = part
{%- endif %}
{%- endfor %}
        scores = scores * {{row("row_scale")}}
{%- if SOFTCAP %}
        # tanh x = 1 - 2 / (exp(2x) + 1); right at both infinities.
        scores = SOFTCAP - 2.0 * SOFTCAP / (tl.exp2(scores * (2.0 * LOG2E / SOFTCAP)) + 1.0)
        scores = scores * LOG2E
{%- endif %}
{%- if ONE_QUERY %}
        valid = live{% if HAS_KEEP %} & kept{% endif %}

        mask = {{tok("valid")}}
{%- else %}
        mask = {{tok("t")}} <= {{row("hi")}}
{%- if HAS_LO %}
        mask = mask & ({{tok("t")}} >= {{row("lo")}})
{%- endif %}
{%- if HAS_KEEP %}
        mask = mask & {{tok("kept")}}
{%- endif %}
{%- endif %}
{%- if BIAS_KIND %}
        b_at = BIAS + b * {{stride("BIAS", 0) if BIAS_B else 0}} + {{row("(head_r * %s + s_r * %s)" % (stride("BIAS", 1) if BIAS_H else 0, stride("BIAS", 2) if BIAS_S else 0))}} + {{tok("t")}} * {{stride("BIAS", 3)}}
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
{%- if value.scaled %}
{%- for i in range(value.scales) %}
        vs_{{i}} = tl.where(valid, vs_{{i}}, 0.0)
{%- endfor %}
        norm = vs_0
{%- for i in range(1, value.scales) %}
        norm = tl.maximum(norm, vs_{{i}})
{%- endfor %}
{%- if value.lifted %}
        # Powers of two only: up to 2^15 for the largest scale of the token, which the probability gives back.
        place = tl.minimum((norm.to(tl.int32, bitcast=True) >> 23) & 255, 250)
        norm = (place - 127).to(tl.float32)
        lower = (place << 23).to(tl.float32, bitcast=True)
        lift = ((268 - place) << 23).to(tl.float32, bitcast=True)
{%- for i in range(value.scales) %}
        lift_{{i}} = (vs_{{i}} * lift).to(tl.float16)
{%- endfor %}
{%- else %}
        norm = tl.maximum(tl.log2(norm), -60.0)
{%- endif %}
        m_new = tl.maximum(m, tl.max(scores + {{tok("norm")}}, {{T_AXIS}}))
{%- else %}
        m_new = tl.maximum(m, tl.max(scores, {{T_AXIS}}))
{%- endif %}
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(scores - {{row("m_safe")}})
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, {{T_AXIS}})
        m = m_new
{%- if not value.scaled %}
        weight = p.to({{value.dot_type}})
{%- else %}
{%- if value.lifted %}
        weight = (p * {{tok("lower")}}).to({{value.dot_type}})
{%- else %}
{%- for i in range(value.scales) %}
        weight_{{i}} = (p * {{tok("vs_%d" % i)}}).to({{value.dot_type}})
{%- endfor %}
{%- endif %}
{%- endif %}
{%- if GUARD_VALUES %}
{%- for chunk in value.chunks %}
        v_{{chunk.name}} = tl.where(valid{{ "[None, :]" if TOKENS_FIRST else "[:, None]" }}, v_{{chunk.name}}, 0.0).to({{value.view_type}})
{%- endfor %}
{%- endif %}
{%- for piece in value.pieces %}
{%- set element = piece.unpack("v_" + piece.chunk.name) %}
{%- if value.lifted %}
{%- set token = "[None, :]" if TOKENS_FIRST else "[:, None]" %}
        element = {{element}} * lift_{{piece.scale}}{{token}}

{%- else %}
        element = {{element}}
{%- endif %}
{%- set weight = "weight_%d" % piece.scale if value.scaled and not value.lifted else "weight" %}
{%- if TOKENS_FIRST %}
        acc_{{piece.name}} = tl.dot(element, {{weight}}, acc_{{piece.name}} * alpha[None, :]{{PRECISION}})
{%- else %}
        acc_{{piece.name}} = tl.dot({{weight}}, element, acc_{{piece.name}} * alpha[:, None]{{PRECISION}})
{%- endif %}
{%- endfor %}
"""

EPILOGUE = r"""
{%- if DIRECT %}
{%- if HAS_SINKS %}
    sink = tl.load(SINKS + head_r * {{stride("SINKS", 0)}}, mask=r_ok, other=float("-inf")).to(tl.float32) * LOG2E
    m_safe = tl.where(m == float("-inf"), sink, m)
    m_safe = tl.where(m_safe == float("-inf"), 0.0, m_safe)
    l = l + tl.exp2(sink - m_safe)
{%- endif %}
    # A NaN in l stays: only what had nothing to attend becomes zero.
    inverse = tl.where(l == 0.0, 0.0, 1.0 / l)
{%- endif %}
    o_z = split
    o_b = b
    o_h = {{row("head_r")}}
    o_s = {{row("s_r")}}.to(INDEX_DTYPE)
{%- for piece in value.pieces %}
{%- set columns = "tl.arange(0, %d)" % piece.chunk.block %}
    o_c = {{channel("(%d + %d * %s)" % (piece.first, piece.step, columns))}}
    o_ok = {{row("r_ok")}}{% if piece.chunk.padded %} & {{channel("(%s < %d)" % (columns, piece.chunk.count))}}{% else %} & (o_c >= 0){% endif %}

    o_val = acc_{{piece.name}}{% if piece.power %} * {{2.0 ** (piece.power - (14 if value.lifted else 0))}}{% endif %}{% if DIRECT %} * {{row("inverse")}}{% endif %}

{%- set shape = (piece.chunk.block|string, "BLOCK_R") if TOKENS_FIRST else ("BLOCK_R", piece.chunk.block|string) %}
    {{store_output(axes, "o_val", "o_ok", val_shape=shape)}}
{%- endfor %}
{%- if not DIRECT %}
    # m and l as two more channels, stored as one narrow block.
    two = {{channel("tl.arange(0, 2)")}}
    o_val = tl.where(two == 0, {{row("m")}}, {{row("l")}})
    o_c = {{value.dim}} + two
    o_ok = {{row("r_ok")}} & (two < 2)
    {{store_output(axes, "o_val", "o_ok", val_shape=("2", "BLOCK_R") if TOKENS_FIRST else ("BLOCK_R", "2"))}}
{%- endif %}
"""

PLANS = r"""
{%- set key, value = plans(KEY_SCHEME, VALUE_SCHEME, KEY_DIM, VALUE_DIM, KEY_WORD, VALUE_WORD, QUERY, WIDE_KEYS, WIDE_VALUES, PACKED) %}
"""

SOURCE = PLANS + OPERANDS + MACROS + "{{def_kernel(*names)}}" + PROLOGUE + LOOP + EPILOGUE
