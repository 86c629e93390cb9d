"""A kernel between the projection and attention, which makes one pass over queries, keys and values.

Queries and keys are normed per head, for models with such norms, and rotated. Keys and values are written to the
paged cache.

Shapes: T tokens, H query heads, G key/value heads, K head dimension.
"""

import triton
import triton.language as tl

FP8_MAX = tl.constexpr(448.0)


@triton.jit
def rotary_store_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    q_out_ptr,
    kv_ptr,
    slot_mapping_ptr,
    norm_weight_ptr,
    cos_ptr,
    sin_ptr,
    kv_scales_ptr,
    norm_eps,
    q_stride,
    k_stride,
    v_stride,
    NUM_KV_HEADS: tl.constexpr,
    HEADS_PER_KV_HEAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HAS_VALUES: tl.constexpr,
):
    """Process one key/value head of one token, and its queries. Grid (T, G). Tokens with a negative slot are padding.

    q [T, H, K], k and v [T, G, K] have strides between tokens. q_out [T, H, K] is contiguous, or None to store only
    keys and values. kv is [blocks, 2, G, BLOCK_SIZE, K], or [blocks, 1, G, BLOCK_SIZE, K] unless `HAS_VALUES`.
    norm_weight is float32 [H + G, K] or None. cos and sin are [T, ROTARY_DIM] as in `RotaryTables`, or None. kv_scales
    is float32 [2, G] or None.
    """
    NUM_HEADS: tl.constexpr = NUM_KV_HEADS * HEADS_PER_KV_HEAD
    token, kv_head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slot_mapping_ptr + token)
    if slot < 0:
        return
    dims_K = tl.arange(0, BLOCK_K)
    if q_out_ptr is not None:
        group = tl.arange(0, BLOCK_HEADS)
        heads = kv_head * HEADS_PER_KV_HEAD + group
        is_head = group < HEADS_PER_KV_HEAD
        q = _normed_and_rotated(
            q_ptr + token * q_stride,
            heads,
            is_head,
            norm_weight_ptr,
            norm_eps,
            cos_ptr,
            sin_ptr,
            token,
            HEAD_DIM,
            ROTARY_DIM,
            BLOCK_K,
        )
        tl.store(
            q_out_ptr
            + token * (NUM_HEADS * HEAD_DIM)
            + heads[:, None] * HEAD_DIM
            + dims_K[None, :],
            q.to(q_out_ptr.dtype.element_ty),
            mask=is_head[:, None] & (dims_K < HEAD_DIM)[None, :],
        )
    # The key is passed as a single row, so that one function serves queries and keys.
    one = tl.arange(0, 1)
    k_weight_ptr = norm_weight_ptr
    if norm_weight_ptr is not None:
        k_weight_ptr += NUM_HEADS * HEAD_DIM
    k = _normed_and_rotated(
        k_ptr + token * k_stride,
        kv_head + one,
        one == 0,
        k_weight_ptr,
        norm_eps,
        cos_ptr,
        sin_ptr,
        token,
        HEAD_DIM,
        ROTARY_DIM,
        BLOCK_K,
    )
    in_head = (dims_K < HEAD_DIM)[None, :]
    NUM_PARTS: tl.constexpr = 2 if HAS_VALUES else 1
    page = (slot // BLOCK_SIZE).to(tl.int64) * (NUM_PARTS * NUM_KV_HEADS) + kv_head
    key_ptr = kv_ptr + (page * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM + dims_K[None, :]
    if kv_scales_ptr is not None:
        k /= tl.load(kv_scales_ptr + kv_head)
    _store(key_ptr, k, in_head)
    if not HAS_VALUES:
        return
    v = tl.load(
        v_ptr + token * v_stride + kv_head * HEAD_DIM + dims_K[None, :], mask=in_head, other=0.0
    ).to(tl.float32)
    if kv_scales_ptr is not None:
        v /= tl.load(kv_scales_ptr + NUM_KV_HEADS + kv_head)
    _store(key_ptr + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM, v, in_head)


@triton.jit
def _normed_and_rotated(
    x_ptr,
    heads,
    is_head,
    weight_ptr,
    eps,
    cos_ptr,
    sin_ptr,
    token,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Return these heads of a token, normed and rotated, float32 [heads, K]."""
    dims = tl.arange(0, BLOCK_K)
    mask = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    x = tl.load(x_ptr + heads[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0.0)
    dtype = x.dtype
    x = x.to(tl.float32)
    rms = 1.0
    if weight_ptr is not None:
        rms = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        weight = tl.load(weight_ptr + heads[:, None] * HEAD_DIM + dims[None, :], mask=mask, other=0)
        x = (x * rms * weight).to(dtype).to(tl.float32)
    if cos_ptr is not None:
        is_rotated = dims < ROTARY_DIM
        half: tl.constexpr = ROTARY_DIM // 2
        partners = tl.where(dims < half, dims + half, dims - half)
        partner_mask = is_head[:, None] & is_rotated[None, :]
        offsets = heads[:, None] * HEAD_DIM + partners[None, :]
        partner = tl.load(x_ptr + offsets, mask=partner_mask, other=0.0).to(tl.float32)
        if weight_ptr is not None:
            weight = tl.load(weight_ptr + offsets, mask=partner_mask, other=0)
            partner = (partner * rms * weight).to(dtype).to(tl.float32)
        cos = tl.load(cos_ptr + token * ROTARY_DIM + dims, mask=is_rotated, other=1.0)
        sin = tl.load(sin_ptr + token * ROTARY_DIM + dims, mask=is_rotated, other=0.0)
        x = x * cos.to(tl.float32)[None, :] + partner * sin.to(tl.float32)[None, :]
    return x


@triton.jit
def _store(ptr, x, mask):
    if ptr.dtype.element_ty == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x, -FP8_MAX), FP8_MAX)
    tl.store(ptr, x.to(ptr.dtype.element_ty), mask=mask)
