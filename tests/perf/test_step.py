"""Step times on given ceilings, against arithmetic by hand."""

from __future__ import annotations

import msgspec
import pytest

from hullspeed.errors import UnsupportedModelError
from hullspeed.hardware.ceilings import Ceilings, Curve
from hullspeed.perf.step import StepCost
from hullspeed.perf.work import Shape

from .conftest import dense_arch

LAYER_PARAMS = 512 * (512 + 2 * 128) + 512 * 512 + 3 * 512 * 1024
MLP_PARAMS = 3 * 512 * 1024
HEAD_PARAMS = 1000 * 512


def test_one_decode_token_by_hand(ceilings: Ceilings) -> None:
    parts = StepCost(dense_arch(), ceilings).parts([Shape(1, 99)])
    assert parts.linear_s == pytest.approx(2 * 4 * LAYER_PARAMS / 1e9)
    assert parts.head_s == pytest.approx(2 * HEAD_PARAMS / 1e9)
    assert parts.decode_attention_s == pytest.approx(4 * 2 * 2 * 64 * 4 * 100 / 1e9)
    assert parts.chunk_attention_s == parts.step_overhead_s == 0


def test_one_chunk_by_hand(ceilings: Ceilings) -> None:
    """The last layer's MLP runs for the one row whose logits are wanted."""
    parts = StepCost(dense_arch(), ceilings).parts([Shape(64, 0)])
    multiplied = 64 * 4 * LAYER_PARAMS - 63 * MLP_PARAMS
    assert parts.linear_s == pytest.approx(2 * multiplied / 1e9)
    pairs = 64 * 65 / 2
    assert parts.chunk_attention_s == pytest.approx(4 * 4 * 8 * 64 * pairs / 1e9)
    assert parts.decode_attention_s == 0


def test_a_chunk_that_does_not_end_a_prompt_has_no_logits(ceilings: Ceilings) -> None:
    assert StepCost(dense_arch(), ceilings).parts([Shape(64, 0, sample=False)]).head_s == 0


def test_nothing_takes_no_time(ceilings: Ceilings) -> None:
    assert StepCost(dense_arch(), ceilings).seconds([]) == 0


def test_overheads_count_once_where_they_arise(ceilings: Ceilings) -> None:
    over = msgspec.structs.replace(
        ceilings.overheads, step_s=1.0, layer_s=0.1, layer_token_s=0.01, sequence_s=0.001
    )
    slow = msgspec.structs.replace(ceilings, overheads=over)
    parts = StepCost(dense_arch(), slow).parts([Shape(1, 10)] * 3 + [Shape(5, 0)])
    assert parts.layer_overhead_s == pytest.approx(4 * (0.1 + 0.01 * 8 * 0.5))
    assert parts.step_overhead_s == pytest.approx(1.0 + 4 * 0.001)


def test_batches_use_the_rate_of_their_rows(ceilings: Ceilings) -> None:
    """Decode at batch 8 reads the weights once: eight tokens in the time of one."""
    curve = Curve((1.0, 8.0), (1e9, 8e9))
    fast = msgspec.structs.replace(ceilings, linear_flops_per_s={"fp16": curve})
    cost = StepCost(dense_arch(), fast)
    one, eight = cost.parts([Shape(1, 10)]), cost.parts([Shape(1, 10)] * 8)
    assert eight.linear_s == pytest.approx(one.linear_s)


def test_longer_contexts_and_batches_take_longer(ceilings: Ceilings) -> None:
    cost = StepCost(dense_arch(), ceilings)
    assert cost.seconds([Shape(1, 100)]) < cost.seconds([Shape(1, 1000)])
    assert cost.seconds([Shape(1, 100)]) < cost.seconds([Shape(1, 100)] * 2)
    assert cost.seconds([Shape(64, 0)]) < cost.seconds([Shape(64, 1000)])


def test_a_format_that_was_not_measured_is_refused(ceilings: Ceilings) -> None:
    only = msgspec.structs.replace(ceilings, linear_flops_per_s={"fp16": Curve((1.0,), (1e9,))})
    with pytest.raises(UnsupportedModelError, match="no measured rate"):
        StepCost(dense_arch(), only, "fp32")
