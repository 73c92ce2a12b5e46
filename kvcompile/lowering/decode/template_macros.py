"""The parts of the attend template that depend on how a slot is decoded: loads, scores of a tile, sums of values.

Macros with ``full`` print a tile of which every token is attended to by every row: nothing is masked. The
caller's names: t0 the tile's first token, t_i and t its tokens, live which of them exist, b and h the batch row
and the kv head. How codes become numbers is ``slot_plan.Decode``; what each way costs is in benchmarks/NOTES.md.

FOLDED keys. A tile lies in one block of tokens, so its scales are one number a channel: they multiply the queries, in
float16. The zero points add q . zero to every score of the tile: sixteen equal rows of them are one narrow dot, and the
accumulator starts from its result. Queries are at most one, so their products with any scale are finite; products
below 2^-14 lose bits, which is why parts whose codes stand more than two octaves apart have accumulators of their own.

SHIFTED values. code * scale + zero point is one fused multiply-add on two elements. One power of two a tile brings its
largest scale to 2^14, where codes that are float16 subnormals become normal numbers, and the probabilities give it
back. Nothing but that instruction rounds: codes put in the top of a mantissa, 1 + code / u, need no power of two, but round
zero / u - scale, the same for a whole group; over 131072 tokens of noise that was 2% of what remained of it.

What Triton does not know to be a load may be repeated in whatever layout its use wants. So the queries of FOLDED keys
are loaded by an instruction of their own: they are needed as operands of the tensor cores, to be multiplied there.
"""

# ruff: noqa: E501 - a line of the template is one line of the kernel.

from __future__ import annotations

MACROS = r"""
{%- macro tok(x) %}{{x}}{{ "[:, None]" if TOKENS_FIRST else "[None, :]" }}{% endmacro %}
{%- macro row(x) %}{{x}}{{ "[None, :]" if TOKENS_FIRST else "[:, None]" }}{% endmacro %}
{%- macro channel(x) %}{{tok(x)}}{% endmacro %}
{%- set axes = ("o_b", "o_h", "o_s", "o_c") if DIRECT else ("o_z", "o_b", "o_h", "o_s", "o_c") %}
{#- A tile inside one page may be loaded whole: the page is there, and what is stale in it is masked later,
    except values that are not scaled (0 * NaN). #}
{%- set WHOLE = PAGED and BLOCK_T <= PAGE_ROWS %}
{%- set T_AXIS = 0 if TOKENS_FIRST else 1 %}
{%- set R_AXIS = 1 - T_AXIS %}
{%- set PRECISION = ', input_precision="ieee"' %}
{%- set MODEL_TYPE = "tl." + QUERY.strip("'") %}
{%- macro over(x, block) %}{{ "(%s // %d)" % (x, block) if block > 1 else x }}{% endmacro %}
{%- macro page(plane, view, block=1) %}
{%- if not PAGED -%}
{{over("t0", block)}}.to(tl.int64) * ({{stride_of(plane, 3)}} // {{view}})
{%- elif BLOCK_T <= PAGE_ROWS -%}
(t0 // PAGE_ROWS).to(tl.int64) * ({{stride_of(plane, 0)}} // {{view}}) + {{over("(t0 % PAGE_ROWS)", block)}} * ({{stride_of(plane, 3)}} // {{view}})
{%- else -%}
(t0 // PAGE_ROWS).to(tl.int64) * ({{stride_of(plane, 0)}} // {{view}})
{%- endif -%}
{%- endmacro %}
{%- macro rows_of(plane, view, block=1) %}
{%- if PAGED and BLOCK_T > PAGE_ROWS -%}
(t_i // PAGE_ROWS).to(tl.int64) * ({{stride_of(plane, 0)}} // {{view}}) + {{over("(t_i % PAGE_ROWS)", block)}} * ({{stride_of(plane, 3)}} // {{view}})
{%- else -%}
{{over("t_i", block)}} * ({{stride_of(plane, 3)}} // {{view}})
{%- endif -%}
{%- endmacro %}
{%- macro plane(var, name, view, recast, block=1) %}
    {{var}} = {{name}}{{ ".to(tl.pointer_type(%s))" % recast if recast else "" }} + b * ({{stride_of(name, 1)}} // {{view}}) + h * ({{stride_of(name, 2)}} // {{view}})
    {{var}}_t = {{rows_of(name, view, block)}}
{%- endmacro %}
{%- macro planes_of(var, name, plan, pack) %}
{{plane(var + "_base", name + "_WORDS", plan.words_per_view, "tl.uint16" if plan.words_per_view == 2 else none)}}
{%- for suffix, letter in ((("_SCALES", "s"),) if plan.scaled else ()) + ((("_ZEROS", "z"),) if plan.zeros else ()) %}
{{plane(var + letter + "_base", name + suffix, pack, "tl.uint%d" % (16 * pack) if pack > 1 else none, plan.token_block)}}
{%- endfor %}
{%- if plan.levels %}
    {{var}}l_base = {{name}}_TABLE + h * {{stride_of(name + "_TABLE", 2)}}
{%- endif %}
{%- if plan.tabled %}
{%- for low, high in plan.pairs %}
    {{var}}_table_{{low}}_{{high}} = {{pair_table("pairs_%s_%d_%d" % (var, low, high), "(%sl_base + %d * %s)" % (var, low, stride_of(name + "_TABLE", 3)), "(%sl_base + %d * %s)" % (var, high, stride_of(name + "_TABLE", 3)), stride_of(name + "_TABLE", 4))}}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- macro load_scales(var, base, name, plan, pack, full, as_float=true) %}
{%- set mask = "" if WHOLE or full else ", mask=live, other=0.0" %}
{%- set cast = ".to(tl.float32)" if as_float else "" %}
{%- if pack > 1 %}
        {{var}}_all = tl.load({{base}} + ({{page(name, pack)}}) + {{base}}_t{{ mask.replace("0.0", "0") }})
{%- for i in range(plan.scales) %}
        {{var}}_{{i}} = ({{var}}_all{% if i %} >> {{16 * i}}{% endif %}).to(tl.uint16).to(tl.float16, bitcast=True){{cast}}
{%- endfor %}
{%- else %}
{%- for i in range(plan.scales) %}
        {{var}}_{{i}} = tl.load({{base}} + ({{page(name, 1)}}) + {{base}}_t{% if plan.scales > 1 %} + {{i}} * {{stride_of(name, 4)}}{% endif %}{{mask}}){{cast}}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- macro load_chunk(var, base, name, plan, chunk, channels_first, full) %}
{%- set token = "[None, :]" if channels_first else "[:, None]" %}
{%- set column = "[:, None]" if channels_first else "[None, :]" %}
{%- set whole = full or WHOLE and (not plan.plain or var == "k") %}
{%- set inside = "(tl.arange(0, %d) < %d)%s" % (chunk.block, chunk.count, column) %}
{%- set terms = ([] if whole else ["live" + token]) + ([inside] if chunk.padded else []) %}
{%- set mask = "mask=%s, other=0" % " & ".join(terms) if terms else "" %}
{%- set step = " * %s" % stride_of(name, 4) if plan.words_per_view == 1 else "" %}
{%- for segment in range(plan.segments) %}
        {{var}}_{{chunk.name}}{% if segment %}_{{segment}}{% endif %} = tl.load({{base}} + ({{page(name, plan.words_per_view)}}) + {{base}}_t{{token}} + ({{chunk.first + segment * plan.row_words}} + tl.arange(0, {{chunk.block}})){{column}}{{step}}, {{mask}})
{%- endfor %}
{%- if plan.segments > 1 %}
        {{var}}_{{chunk.name}} = {{var}}_{{chunk.name}}.to(tl.int32){% for segment in range(1, plan.segments) %} | ({{var}}_{{chunk.name}}_{{segment}}.to(tl.int32) << {{8 * segment}}){% endfor %}

{%- endif %}
{%- endmacro %}
{%- macro load_element_scales(var, letter, name, plan, piece, channels_first, full) %}
{#- Scales or zero points of a piece: a vector where one of the two axes shares them. #}
{%- set token = "[None, :]" if channels_first else "[:, None]" %}
{%- set column = "[:, None]" if channels_first else "[None, :]" %}
{%- set base = var + letter + "_base" %}
{%- set one_block = plan.token_block > 1 and BLOCK_T <= plan.token_block %}
{%- set channels = "tl.minimum(%d + %d * tl.arange(0, %d), %d)" % (piece.first, piece.step, piece.block, plan.dim - 1) %}
{%- set start = "%s + (%s)" % (base, page(name, 1, plan.token_block)) %}
{%- if plan.single_group(piece) %}
{%- set at = "%s + %d * %s" % (start, piece.first // plan.group, stride_of(name, 4)) %}
{%- else %}
{%- set at = "%s + (%s * %s)%s" % (start, over(channels, plan.group), stride_of(name, 4), column) %}
{%- endif %}
        {{letter}} = tl.load({{at}}{% if not one_block %} + {{base}}_t{{token}}, mask=({% if full or WHOLE %}t_i >= 0{% else %}live{% endif %}){{token}}, other=0.0{% endif %}).to(tl.float32)
{%- endmacro %}
{%- macro decode_element(var, name, plan, piece, channels_first, full) %}
{#- ``element``: a piece's values in float32. #}
{%- set column = "[:, None]" if channels_first else "[None, :]" %}
        element = {{piece.unpack(var + "_" + piece.chunk.name)}}
{%- if plan.levels %}
{%- set channels = "tl.minimum(%d + %d * tl.arange(0, %d), %d)" % (piece.first, piece.step, piece.block, plan.dim - 1) %}
        element = tl.load({{var}}l_base + ({{over(channels, plan.group)}} * {{stride_of(name + "_TABLE", 3)}}){{column}} + element.to(tl.int32) * {{stride_of(name + "_TABLE", 4)}}).to(tl.float32)
{%- endif %}
{%- if plan.scaled %}
{{- load_element_scales(var, "s", name + "_SCALES", plan, piece, channels_first, full) }}
        element = element * s
{%- endif %}
{%- if plan.zeros %}
{{- load_element_scales(var, "z", name + "_ZEROS", plan, piece, channels_first, full) }}
        element = element + z
{%- endif %}
{%- endmacro %}
"""

ROTATION = r"""
{#- RoPE inside the dot: sum_c q_c (k_c cos_c + rotated(k)_c sin_c) = sum_c (k_c cos_c) q_c + (k_c sin_c') q_c' with c' the
    channel that c is rotated into, q_c' with that rotation's sign: no key ever changes its place. #}
{%- macro partner(channels) -%}
{{ "(%s ^ 1)" % channels if INTERLEAVED else "tl.where(%s < %d, %s + %d, %s - %d)" % (channels, ROTARY_DIM // 2, channels, ROTARY_DIM // 2, channels, ROTARY_DIM // 2) }}
{%- endmacro %}
{%- macro load_turned(name, first, step, count, block) %}
{#- ``name``: the queries at c', negative where rotation makes them so, zero where nothing is rotated. #}
    {{name}}_c = {{first}} + {{step}} * tl.arange(0, {{block}})
    {{name}}_ok = ({{name}}_c < {{ROTARY_DIM}}) & (tl.arange(0, {{block}}) < {{count}})
{%- if TOKENS_FIRST %}
    {{name}} = tl.load(q_base[None, :] + ({{partner(name + "_c")}} * {{stride_of("Q", 3)}})[:, None], mask={{name}}_ok[:, None] & r_ok[None, :], other=0.0)
{%- else %}
    {{name}} = tl.load(q_base[:, None] + ({{partner(name + "_c")}} * {{stride_of("Q", 3)}})[None, :], mask={{name}}_ok[None, :] & r_ok[:, None], other=0.0)
{%- endif %}
    {{name}} = tl.where(({{ name + ("_c % 2 == 0" if INTERLEAVED else "_c < %d" % (ROTARY_DIM // 2)) }}){{ "[:, None]" if TOKENS_FIRST else "[None, :]" }}, {{name}}, -{{name}})
{%- endmacro %}
{%- macro rotated_dot(first, step, count, block, q, turned, dtype, chained) %}
{#- ``element`` [tokens, channels] (or transposed) of unrotated keys, dotted with the queries into ``part``. #}
{%- set token = "[:, None]" if TOKENS_FIRST else "[None, :]" %}
{%- set column = "[None, :]" if TOKENS_FIRST else "[:, None]" %}
        rotary_c = {{first}} + {{step}} * tl.arange(0, {{block}})
        rotary_ok = live{{token}} & ((rotary_c < {{ROTARY_DIM}}) & (tl.arange(0, {{block}}) < {{count}})){{column}}
        cos_at = b * {{stride_of("COS", 0) if ROTATION_B else 0}} + t{{token}} * {{stride_of("COS", 1)}} + (rotary_c * {{stride_of("COS", 2)}}){{column}}
        sin_at = b * {{stride_of("SIN", 0) if ROTATION_B else 0}} + t{{token}} * {{stride_of("SIN", 1)}} + ({{partner("rotary_c")}} * {{stride_of("SIN", 2)}}){{column}}
        straight = (element * tl.load(COS + cos_at, mask=rotary_ok, other=1.0).to(tl.float32)).to({{dtype}})
        across = (element * tl.load(SIN + sin_at, mask=rotary_ok, other=0.0).to(tl.float32)).to({{dtype}})
        part = tl.dot({{ "straight, " + q if TOKENS_FIRST else q + ", straight" }}{% if chained %}, part{% endif %}{{PRECISION}})
        part = tl.dot({{ "across, " + turned if TOKENS_FIRST else turned + ", across" }}, part{{PRECISION}})
{%- endmacro %}
"""

SCORES = r"""
{%- set folded_pieces = [] %}
{%- for piece in key.pieces if key.folded %}{% set _ = folded_pieces.append((key.lowered(piece), piece)) %}{% endfor %}
{%- macro load_keys(full) %}
{%- for chunk in key.chunks %}
{{- load_chunk("k", "k_base", "K_WORDS", key, chunk, not TOKENS_FIRST, full) }}
{%- endfor %}
{%- if key.by_token %}{{ load_scales("ks", "ks_base", "K_SCALES", key, KEY_SCALE_PACK, full) }}{% endif %}
{%- if key.tabled %}{{ load_scales("kz", "kz_base", "K_ZEROS", key, KEY_SCALE_PACK, full) }}{% endif %}
{%- if key.folded %}
{%- for piece in key.pieces if piece.first % 2 == 0 %}
{%- set at = "%d + tl.arange(0, %d)" % (piece.first // 2, piece.block) %}
{%- set mask = ", mask=tl.arange(0, %d) < %d, other=0" % (piece.block, piece.chunk.count) if piece.chunk.padded else "" %}
        ks_{{piece.name}} = tl.load(ks_base + ({{page("K_SCALES", 2, key.token_block)}}) + {{at}}{{mask}})
        kz_{{piece.name}} = tl.load(kz_base + ({{page("K_ZEROS", 2, key.token_block)}}) + {{at}}{{mask}})
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- macro look_up(var, plan) %}
{#- Both parts of every byte: the names that pieces unpack to. #}
{%- for chunk in plan.chunks %}
{%- for byte in range(2) %}
{%- set word = "%s_%s" % (var, chunk.name) %}
        {{word}}_0_{{byte}}, {{word}}_1_{{byte}} = {{looked_up(byte, word, "pairs_%s_%d_%d" % ((var,) + plan.pair_of(chunk)))}}
{%- endfor %}
{%- endfor %}
{%- endmacro %}
{%- macro token_scores() %}
{%- if key.tabled %}{{ look_up("k", key) }}{% endif %}
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
{%- if key.tabled %}
        scores = scores + {{tok("kz_%d" % i)}} * {{row("sum_%d" % i)}}
{%- endif %}
{%- else %}
        scores = part
{%- endif %}
{%- endfor %}
        scores = scores * {{row("row_scale")}}
{%- endmacro %}
{%- macro halves_of(letter, piece) -%}
{#- The scales or zero points of one piece: words hold those of the even and of the odd byte. #}
{%- set even = "%s_%s_%d" % (letter, piece.chunk.name, (piece.name.rpartition("_")[2]|int) // 2 * 2) -%}
({{even}}{{ " >> 16" if piece.first % 2 }}).to(tl.uint16).to(tl.float16, bitcast=True)
{%- endmacro %}
{%- macro times(one, other, shape) -%}
{{ multiplied(one, "tl.broadcast_to(%s, %s)" % (other, shape)) if PACKED else "%s * %s" % (one, other) }}
{%- endmacro %}
{%- macro folded_scores() %}
{%- for lowered, pieces in folded_pieces|groupby(0) %}
{%- for _, piece in pieces %}
        zero = tl.dot(tl.broadcast_to({{halves_of("kz", piece)}}[None, :], [16, {{piece.block}}]), q_{{piece.name}}{% if not loop.first %}, zero{% endif %}{{PRECISION}})
{%- endfor %}
{%- if loop.first %}
        zeros = zero * {{2.0 ** (lowered - key.power)}}
{%- else %}
        zeros = zeros + zero * {{2.0 ** (lowered - key.power)}}
{%- endif %}
{%- endfor %}
        part_0 = tl.reshape(tl.broadcast_to(zeros[None, :, :], [BLOCK_T // 16, 16, BLOCK_R]), [BLOCK_T, BLOCK_R])
{%- for span in key.spans %}
{%- set part = "part_%d" % loop.index0 %}
{%- set begun = loop.first %}
{%- for piece in key.pieces if piece.power in span %}
        {{part}} = tl.dot({{piece.unpack("k_" + piece.chunk.name)}}, {{times("q_" + piece.name, halves_of("ks", piece) + "[:, None]", "[%d, BLOCK_R]" % piece.block)}}{% if begun or not loop.first %}, {{part}}{% endif %}{{PRECISION}})
{%- endfor %}
{%- if not loop.first %}
        part_0 = part_0 + {{part}} * {{2.0 ** (span[0] - key.power)}}
{%- endif %}
{%- endfor %}
        scores = part_0 * row_scale[None, :]
{%- endmacro %}
{%- macro element_scores(full) %}
{%- for piece in key.pieces %}
{{- decode_element("k", "K", key, piece, not TOKENS_FIRST, full) }}
{%- if ROTARY_DIM %}
{{- rotated_dot(piece.first, piece.step, piece.chunk.count, piece.block, "q_" + piece.name, "turned_" + piece.name, key.dot_type, not loop.first) }}
{%- else %}
        element = element.to({{key.dot_type}})
        part = tl.dot({{ "element, q_" + piece.name if TOKENS_FIRST else "q_%s, element" % piece.name }}{% if not loop.first %}, part{% endif %}{{PRECISION}})
{%- endif %}
{%- endfor %}
        scores = part * {{row("row_scale")}}
{%- endmacro %}
"""

VALUES = r"""
{%- macro half_power(exponent) -%}
(({{exponent}}) << 23).to(tl.float32, bitcast=True).to(tl.float16)
{%- endmacro %}
{%- macro scaled(values, factor, octaves) -%}
{{ scaled_by(values, factor, octaves) if PACKED else "%s * %s%s" % (values, factor, " * %s" % 2.0 ** octaves if octaves else "") }}
{%- endmacro %}
{%- macro load_values(full) %}
{%- for chunk in value.chunks %}
{{- load_chunk("v", "v_base", "V_WORDS", value, chunk, TOKENS_FIRST, full) }}
{%- endfor %}
{%- if value.by_token %}{{ load_scales("vs", "vs_base", "V_SCALES", value, VALUE_SCALE_PACK, full) }}{% endif %}
{%- if value.shifted %}
{{- load_scales("vs", "vs_base", "V_SCALES", value, VALUE_SCALE_PACK, full, false) }}
{{- load_scales("vz", "vz_base", "V_ZEROS", value, VALUE_SCALE_PACK, full, false) }}
{%- endif %}
{%- endmacro %}
{%- macro add_values(full) %}
{#- Running maximum, probabilities, and the sums of values; rows of a tile that none attends to are zeroed. #}
{%- if value.by_token %}
{%- for i in range(value.scales) if not full %}
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
{%- elif value.shifted %}
{%- for i in range(value.scales) if not full %}
        vs_{{i}} = tl.where(valid, vs_{{i}}, 0.0)
        vz_{{i}} = tl.where(valid, vz_{{i}}, 0.0)
{%- endfor %}
{%- if not value.tabled %}
        # The exponent of the tile's largest scale, or of its zero points less nine: what is NaN stays so.
        v_top = tl.maximum(tl.abs(vz_0) * 0.001953125, vs_0)
{%- for i in range(1, value.scales) %}
        v_top = tl.maximum(v_top, tl.maximum(tl.abs(vz_{{i}}) * 0.001953125, vs_{{i}}))
{%- endfor %}
        v_place = tl.minimum(tl.max((v_top.to(tl.int16, bitcast=True) & 0x7FFF).to(tl.int32), 0) >> 10, 29)
        norm = (v_place - 15).to(tl.float32)
        v_shrink = {{half_power("142 - v_place")}}
{%- endif %}
{%- for i in range(value.scales) %}
{%- if value.tabled %}
        vz_{{i}}_1 = {{scaled("vz_%d" % i, "tl.full([], 0.5, tl.float16)", 0)}}
        vs_{{i}} = {{scaled("vs_%d" % i, "tl.full([], 0.5, tl.float16)", 0)}}
{%- else %}
{%- for power in value.powers_of(i) %}
        vz_{{i}}_{{power}} = {{scaled("vz_%d" % i, half_power("%d - v_place" % (156 - power)), 0)}}
{%- endfor %}
        vs_{{i}} = {{scaled("vs_%d" % i, "v_shrink", 14)}}
{%- endif %}
{%- endfor %}
{%- if value.tabled %}
        m_new = tl.maximum(m, tl.max(scores, 0))
{%- else %}
        m_new = tl.maximum(m, tl.max(scores, 0) + norm)
{%- endif %}
{%- else %}
        m_new = tl.maximum(m, tl.max(scores, {{T_AXIS}}))
{%- endif %}
        m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
{%- if value.shifted %}
        # Up to 2^14, so that float16 holds what is 2^-38 of the largest; m gives it back at the end.
        p = tl.exp2(scores - (m_safe - {{ "14.0" if value.tabled else "(norm + 14.0)" }})[None, :])
{%- else %}
        p = tl.exp2(scores - {{row("m_safe")}})
{%- endif %}
        alpha = tl.exp2(m - m_safe)
        l = l * alpha + tl.sum(p, {{T_AXIS}}){% if value.shifted and not value.tabled %} * ((142 - v_place) << 23).to(tl.float32, bitcast=True){% endif %}

        m = m_new
{%- if not value.by_token %}
        weight = p.to({{value.dot_type}})
{%- elif value.lifted %}
        weight = (p * {{tok("lower")}}).to({{value.dot_type}})
{%- else %}
{%- for i in range(value.scales) %}
        weight_{{i}} = (p * {{tok("vs_%d" % i)}}).to({{value.dot_type}})
{%- endfor %}
{%- endif %}
{%- set token = "[None, :]" if TOKENS_FIRST else "[:, None]" %}
{%- if GUARD_VALUES and not full %}
{%- for chunk in value.chunks %}
        v_{{chunk.name}} = tl.where(valid{{token}}, v_{{chunk.name}}, 0.0).to({{value.view_type}})
{%- endfor %}
{%- endif %}
{%- if value.tabled %}{{ look_up("v", value) }}{% endif %}
{%- for piece in value.pieces %}
{%- set element = piece.unpack("v_" + piece.chunk.name) %}
{%- if value.elements %}
{{- decode_element("v", "V", value, piece, TOKENS_FIRST, full) }}
        element = {% if full %}element{% else %}tl.where(valid{{token}}, element, 0.0){% endif %}.to({{value.dot_type}})
{%- elif value.shifted %}
{%- if PACKED %}
{%- set shape = "[%d, BLOCK_T]" % piece.block %}
        element = {{piece.unpack("v_" + piece.chunk.name, "tl.broadcast_to(vs_%d[None, :], %s)" % (piece.scale, shape), "tl.broadcast_to(vz_%d_%d[None, :], %s)" % (piece.scale, piece.power, shape))}}
{%- else %}
        # Rounded once, as the fused instruction does.
        element = ({{element}}.to(tl.float32) * vs_{{piece.scale}}[None, :] + vz_{{piece.scale}}_{{piece.power}}[None, :]).to(tl.float16)
{%- endif %}
{%- elif value.lifted %}
        element = {{element}} * lift_{{piece.scale}}{{token}}
{%- else %}
        element = {{element}}
{%- endif %}
{%- set weight = "weight_%d" % piece.scale if value.by_token and not value.lifted else "weight" %}
{%- if TOKENS_FIRST %}
        acc_{{piece.name}} = tl.dot(element, {{weight}}, acc_{{piece.name}} * alpha[None, :]{{PRECISION}})
{%- else %}
        acc_{{piece.name}} = tl.dot({{weight}}, element, acc_{{piece.name}} * alpha[:, None]{{PRECISION}})
{%- endif %}
{%- endfor %}
{%- endmacro %}
"""
