"""The Triton kernels of Kimi Delta Attention; `triton_ops.py` launches them.

Everything is widened to float32 right after its load, scalars are cast by `tl.cast`, builtins
are called through `tl`, and nothing is tuned at run time: so the kernels also run in Triton's
interpreter, which checks indices, masks and algebra, not precision or races.

Letters: B sequences, T tokens, H heads, K key width, V value width, W convolution taps,
Q = 2 * H * K + H * V channels of the convolution.

Source: K3 architecture sheet, section 2.3; KDA kernel notes, section 7.
"""

# A kernel's parameters are pointers and scalars of the compiler's, which have no Python types;
# tl.static_range is unrolled by the compiler and never iterated.
# pyright: reportMissingParameterType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl


@triton.jit
def _load_input(
    qkv,
    window,
    row,
    offset,
    first,
    page,
    has_state,
    qkv_row,
    window_page,
    window_row,
    channels,
    in_range,
    TAPS: tl.constexpr,
):
    """Input of the convolution at `offset` of a chunk; negative offsets lie in the window."""
    # Scalars are spread over the tile: a mask made of both kinds is none in the interpreter.
    is_here = in_range & (channels * 0 + offset >= 0)
    is_kept = in_range & (channels * 0 + offset < 0) & (channels * 0 + has_state != 0)
    here = tl.load(qkv + (first + offset) * qkv_row + channels, mask=is_here, other=0.0)
    before = tl.load(
        window + page * window_page + (TAPS - 1 + offset) * window_row + channels,
        mask=is_kept,
        other=0.0,
    )
    # One of the two is zero everywhere.
    return here.to(tl.float32) + before.to(tl.float32)


@triton.jit
def convolve(
    qkv,
    window,
    taps,
    mixed,
    starts,
    sequences,
    pages,
    has_states,
    qkv_row,
    window_page,
    window_row,
    num_channels,
    TAPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Mixed [T, Q] = SiLU of the causal convolution; one token and tile of channels each."""
    row = tl.cast(tl.program_id(0), tl.int64)
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_range = channels < num_channels
    sequence = tl.load(sequences + row)
    first = tl.cast(tl.load(starts + sequence), tl.int64)
    page = tl.load(pages + sequence)
    has_state = tl.load(has_states + sequence)
    total = tl.zeros((TILE,), dtype=tl.float32)
    for tap in tl.static_range(TAPS):
        value = _load_input(
            qkv,
            window,
            row,
            row - first - (TAPS - 1) + tap,
            first,
            page,
            has_state,
            qkv_row,
            window_page,
            window_row,
            channels,
            in_range,
            TAPS,
        )
        total += value * tl.load(taps + channels * TAPS + tap, mask=in_range, other=0.0)
    total = total / (1.0 + tl.exp(-total))
    tl.store(mixed + row * num_channels + channels, total, mask=in_range)


@triton.jit
def move_windows(
    qkv,
    window,
    starts,
    pages,
    has_states,
    export_starts,
    exports,
    qkv_row,
    window_page,
    window_row,
    num_channels,
    TAPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Write exported windows, then the live one; one sequence and tile of channels each.

    A channel belongs to one thread throughout, and the live window's rows move up in
    ascending order, so nothing is read after it was overwritten.
    """
    sequence = tl.program_id(0)
    channels = tl.program_id(1) * TILE + tl.arange(0, TILE)
    in_range = channels < num_channels
    first = tl.cast(tl.load(starts + sequence), tl.int64)
    length = tl.load(starts + sequence + 1) - tl.load(starts + sequence)
    live = tl.load(pages + sequence)
    has_state = tl.load(has_states + sequence)
    low = tl.load(export_starts + sequence)
    high = tl.load(export_starts + sequence + 1)
    for index in range(low, high + 1):
        is_export = index < high
        consumed = tl.load(exports + 2 * index, mask=is_export, other=0)
        consumed = tl.where(is_export, consumed, length)
        page = tl.load(exports + 2 * index + 1, mask=is_export, other=0)
        page = tl.where(is_export, tl.cast(page, tl.int64), live)
        for kept in tl.static_range(TAPS - 1):
            value = _load_input(
                qkv,
                window,
                first,
                tl.cast(consumed, tl.int64) - (TAPS - 1) + kept,
                first,
                live,
                has_state,
                qkv_row,
                window_page,
                window_row,
                channels,
                in_range,
                TAPS,
            )
            to = window + page * window_page + kept * window_row + channels
            tl.store(to, value.to(window.dtype.element_ty), mask=in_range)


@triton.jit
def _decay(gate, bias, rate, LOWER_BOUND: tl.constexpr):
    """e^g of the raw gate; a lower bound of 0 stands for the unbounded gate."""
    shifted = gate + bias
    if LOWER_BOUND < 0:
        log_decay = LOWER_BOUND / (1.0 + tl.exp(-rate * shifted))
    else:
        # Beyond 20 the softplus is its argument to float32's last bit.
        soft = tl.where(shifted > 20.0, shifted, tl.log(1.0 + tl.exp(tl.minimum(shifted, 20.0))))
        log_decay = -rate * soft
    return tl.exp(log_decay)


@triton.jit
def _unit(x):
    """X divided by its length."""
    return x / tl.sqrt(tl.sum(x * x, axis=0) + 1e-6)


@triton.jit
def recur(
    mixed,
    gate,
    beta,
    a_log,
    dt_bias,
    pool,
    out,
    starts,
    pages,
    has_states,
    export_starts,
    exports,
    gate_row,
    gate_head,
    beta_row,
    beta_head,
    pool_page,
    H: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    KEY_TILE: tl.constexpr,
    VALUE_TILE: tl.constexpr,
    LOWER_BOUND: tl.constexpr,
):
    """The recurrence over one chunk for one head and tile of V, state [V, K] in registers."""
    sequence, head = tl.program_id(1) // H, tl.program_id(1) % H
    keys = tl.arange(0, KEY_TILE)
    values = tl.program_id(0) * VALUE_TILE + tl.arange(0, VALUE_TILE)
    in_keys, in_values = keys < K, values < V
    in_state = in_values[:, None] & in_keys[None, :]
    place = (head * V + values[:, None]) * K + keys[None, :]
    first = tl.load(starts + sequence)
    live = pool + tl.load(pages + sequence) * pool_page
    is_kept = in_state & (place * 0 + tl.load(has_states + sequence) != 0)
    state = tl.load(live + place, mask=is_kept, other=0.0)
    rate = tl.exp(tl.load(a_log + head))
    bias = tl.load(dt_bias + head * K + keys, mask=in_keys, other=0.0)
    export = tl.load(export_starts + sequence)
    export_end = tl.load(export_starts + sequence + 1)
    for t in range(first, tl.load(starts + sequence + 1)):
        row = tl.cast(t, tl.int64)
        inputs = mixed + row * (H * (2 * K + V))
        q = _unit(tl.load(inputs + head * K + keys, mask=in_keys, other=0.0)) * K**-0.5
        k = _unit(tl.load(inputs + (H + head) * K + keys, mask=in_keys, other=0.0))
        v = tl.load(inputs + 2 * H * K + head * V + values, mask=in_values, other=0.0)
        raw = tl.load(gate + row * gate_row + head * gate_head + keys, mask=in_keys, other=0.0)
        logit = tl.load(beta + row * beta_row + head * beta_head).to(tl.float32)
        state = state * _decay(raw.to(tl.float32), bias, rate, LOWER_BOUND)[None, :]
        missing = v - tl.sum(state * k[None, :], axis=1)
        state += (missing / (1.0 + tl.exp(-logit)))[:, None] * k[None, :]
        o = tl.sum(state * q[None, :], axis=1)
        tl.store(out + (row * H + head) * V + values, o, mask=in_values)
        wanted = tl.load(exports + 2 * export, mask=export < export_end, other=-1)
        if wanted == t + 1 - first:
            destination = tl.cast(tl.load(exports + 2 * export + 1), tl.int64)
            tl.store(pool + destination * pool_page + place, state, mask=in_state)
            export += 1
    tl.store(live + place, state, mask=in_state)
