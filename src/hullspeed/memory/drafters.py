"""External draft models that share the target's pool."""

from __future__ import annotations

from dataclasses import replace

from hullspeed.arch.mixers import FullAttention, SlidingAttention
from hullspeed.arch.model import Extra, Layer, ModelArch
from hullspeed.errors import UnsupportedModelError

# DFlash2 on the 27B hybrid: a public debug log lists the pool's groups (10 state, 4 full, 1 sliding
# of five layers, `sliding_window: 2048`, 4,096 bytes a token as the target's layers), and four logs
# come out to the token with it.
DFLASH_LAYERS = 5
DFLASH_WINDOW_TOKENS = 2048


def with_dflash(
    arch: ModelArch, *, layers: int = DFLASH_LAYERS, window_tokens: int = DFLASH_WINDOW_TOKENS
) -> ModelArch:
    """The model with a DFlash drafter in place of its own draft layers; weights not counted.

    Raises:
        UnsupportedModelError: no full attention layer whose shape the drafter could share.
    """
    full = next((x for x in arch.layers if type(x.mixer) is FullAttention), None)
    if full is None or not isinstance(full.mixer, FullAttention):
        raise UnsupportedModelError(
            "a DFlash drafter takes the shape of a full attention layer, and this model has none",
            seen=arch.family,
        )
    mixer = SlidingAttention(
        q_heads=full.mixer.q_heads,
        kv_heads=full.mixer.kv_heads,
        head_dim=full.mixer.head_dim,
        rotary_dim=full.mixer.rotary_dim,
        window_tokens=window_tokens,
    )
    drafter = Extra(name="drafter", tensors=(), layers=(Layer(mixer, full.mlp),) * layers)
    return replace(arch, extras=(*(e for e in arch.extras if not e.layers), drafter))
