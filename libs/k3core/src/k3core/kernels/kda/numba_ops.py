"""Kimi Delta Attention with the recurrence compiled by numba: where no C compiler is.

Convolution, norms and gates are the reference's torch operators; only the loop over tokens,
which dominates, is compiled. One task is one head of one sequence, so a row's recurrence has
the same bits in any batch and for any cut; what comes before it is as invariant as torch is.

Importing this module imports numba; the first call of each kind compiles for some seconds.

Letters: B sequences, T tokens, H heads, K key width, V value width.
"""

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from k3core.kernels.interface import KdaInputs, KdaPlan, KdaStates, KdaWeights
from k3core.kernels.kda.reference import prepare

Floats = NDArray[np.float32]
Longs = NDArray[np.int64]

# Sums may be reordered within a row and multiplied-added at once; nothing else is relaxed.
_FAST = {"reassoc", "contract", "nsz"}


class NumbaKda:
    """`Kernels.kda_prefill` and `Kernels.kda_decode`, for float32 and bfloat16 inputs."""

    def __init__(self, num_threads: int) -> None:
        # What numba has now is the most it can be set to.
        numba.set_num_threads(min(num_threads, numba.get_num_threads()))

    def run(
        self, inputs: KdaInputs, weights: KdaWeights, plan: KdaPlan, states: KdaStates
    ) -> torch.Tensor:
        """Run packed chunks through the layer, states in place; see `Kernels.kda_prefill`.

        Returns:
            o: [T, H, V], float32.
        """
        _, num_heads, value_dim, _ = states.recurrent.shape
        o_THV = torch.empty(plan.starts[-1], num_heads, value_dim)
        if len(plan.pages) == plan.starts[-1] and not plan.exports:
            prepared = _prepare_steps(inputs, weights, plan, states)
        else:
            prepared = _prepare_chunks(inputs, weights, plan, states)
        q, k, v, decay, beta = (x.contiguous().numpy() for x in prepared)
        exports = np.array(sorted(plan.exports), dtype=np.int64).reshape(-1, 3)
        _recur(
            q,
            k,
            v,
            decay,
            beta,
            np.array(plan.starts, dtype=np.int64),
            np.array(plan.pages, dtype=np.int64),
            np.array(plan.has_state, dtype=np.bool_),
            exports,
            states.recurrent.numpy(),
            o_THV.numpy(),
        )
        return o_THV


def _prepare_steps(
    inputs: KdaInputs, weights: KdaWeights, plan: KdaPlan, states: KdaStates
) -> tuple[torch.Tensor, ...]:
    """q, k, v, decay, beta of one token a sequence; moves the convolution windows on."""
    value_dim = states.recurrent.shape[2]
    history = states.conv[plan.page_ids].to(inputs.qkv.dtype)
    history = torch.where(plan.state_mask[:, None, None], history, 0)
    window = torch.cat((history, inputs.qkv.unsqueeze(1)), dim=1)
    prepared = prepare(
        window, inputs.gate.unsqueeze(1), inputs.beta.unsqueeze(1), weights, value_dim
    )
    states.conv[plan.page_ids] = window[:, 1:].to(states.conv.dtype)
    return tuple(x.squeeze(1) for x in prepared)


def _prepare_chunks(
    inputs: KdaInputs, weights: KdaWeights, plan: KdaPlan, states: KdaStates
) -> tuple[torch.Tensor, ...]:
    """q, k, v, decay, beta of packed chunks; moves and exports the convolution windows."""
    value_dim, num_kept = states.recurrent.shape[2], states.conv.shape[1]
    parts: list[tuple[torch.Tensor, ...]] = []
    for sequence, page in enumerate(plan.pages):
        rows = slice(plan.starts[sequence], plan.starts[sequence + 1])
        history = states.conv[page].to(inputs.qkv.dtype)
        if not plan.has_state[sequence]:
            history = torch.zeros_like(history)
        window = torch.cat((history, inputs.qkv[rows]))
        parts.append(prepare(window, inputs.gate[rows], inputs.beta[rows], weights, value_dim))
        wanted = [(offset, dst) for row, offset, dst in plan.exports if row == sequence]
        for offset, destination in (*wanted, (rows.stop - rows.start, page)):
            states.conv[destination] = window[offset : offset + num_kept].to(states.conv.dtype)
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


@numba.njit(parallel=True, fastmath=_FAST, nogil=True, cache=True)
def _recur(
    q: Floats,
    k: Floats,
    v: Floats,
    decay: Floats,
    beta: Floats,
    starts: Longs,
    pages: Longs,
    has_state: NDArray[np.bool_],
    exports: Longs,
    pool: NDArray[np.float32],
    out: NDArray[np.float32],
) -> None:
    """q, k, decay [T, H, K], v [T, H, V], beta [T, H]; pool [P, H, V, K]; out [T, H, V]."""
    num_heads, num_rows, num_keys = pool.shape[1], pool.shape[2], pool.shape[3]
    for task in numba.prange(len(pages) * num_heads):
        sequence, head = task // num_heads, task % num_heads
        state = np.zeros((num_rows, num_keys), dtype=np.float32)
        if has_state[sequence]:
            state[:] = pool[pages[sequence], head]
        first = starts[sequence]
        for t in range(first, starts[sequence + 1]):
            for row in range(num_rows):
                seen = np.float32(0)
                for i in range(num_keys):
                    state[row, i] *= decay[t, head, i]
                    seen += state[row, i] * k[t, head, i]
                written = beta[t, head] * (v[t, head, row] - seen)
                read = np.float32(0)
                for i in range(num_keys):
                    state[row, i] += written * k[t, head, i]
                    read += state[row, i] * q[t, head, i]
                out[t, head, row] = read
            for e in range(exports.shape[0]):
                if exports[e, 0] == sequence and exports[e, 1] == t + 1 - first:
                    pool[exports[e, 2], head] = state
        pool[pages[sequence], head] = state
