"""Expert slots of real ranks: spare and absent ones change no token, and experts move while they serve."""

from __future__ import annotations

import asyncio

import pytest

from ep_server.errors import ConfigError
from ep_server.orders import CountExperts, PreparePlacement, SwitchChange
from ep_server.ranks.group import plan_group
from ep_server.ranks.launcher import RankProcesses
from ep_server.ranks.slots import SpareSlots
from ep_server.records import EMPTY
from ep_server.scheduler import Placement
from tests.support.models.checkpoints import EXPERTS, TOP_K, Tiny
from tests.support.ranks.rank_group import Recorder, greedy, rank_config

NEW = 64
SLOTS = {"resilience__spare_slots": "2", "parallel__max_ranks": 3, "exchange__reduction": "source"}


def moved(placement: Placement) -> Placement:
    """Two ranks of three: all experts of rank 0 at rank 1 too; one of rank 1 at rank 0 alone."""
    per = placement.slots_per_rank
    experts, serves = [list(row) for row in placement.experts], [list(row) for row in placement.serves]
    for held, serving in zip(experts, serves, strict=True):
        own, others = held[: EXPERTS // 2], held[per : per + EXPERTS // 2]
        held[per - 1], serving[per - 1], serving[per] = others[0], True, False
        held[2 * per - 2 : 2 * per], serving[2 * per - 2 : 2 * per] = own[:2], [True, True]
    return Placement(EXPERTS, per, tuple(map(tuple, experts)), tuple(map(tuple, serves)))


def test_the_plan_counts_slots(tiny: Tiny) -> None:
    config = rank_config(tiny.path, 2, **SLOTS)
    plan, plain = plan_group(config), plan_group(rank_config(tiny.path, 2, resilience__spare_slots="0"))
    assert plan.exchange.placement == tuple(slot // 5 for slot in range(15))
    assert plan.placement is not None and plan.placement.experts[0][:5] == (0, 1, 2, EMPTY, EMPTY)
    assert plan.weight_bytes[0] == plain.weight_bytes[0] + 2 * plan.spares.slot_bytes
    assert plain.placement is None and plain.exchange.placement == (0, 0, 0, 1, 1, 1)
    assert plan.spares.lacking_bytes(2) == 2 * plan.spares.slot_bytes
    assert plan_group(rank_config(tiny.path, 2)).spares.spares == 3  # automatic
    assert plan_group(rank_config(tiny.path, 2)).spares.lacking_bytes(2) == 0
    fixed = sum(plain.weight_bytes)
    little = plan_group(rank_config(tiny.path, 2), available=fixed + (3 << 28))
    assert little.spares.spares in (0, 3)


@pytest.mark.parametrize(
    ("spares", "lost"),
    [(2, "after the loss of a rank the others wait"), (7, "any one of 4 ranks"), (8, "any 2 of 4 ranks")],
)
def test_the_log_says_how_many_ranks_may_be_lost(spares: int, lost: str) -> None:
    assert lost in SpareSlots(spares, 8 + spares, num_experts=32, slot_bytes=1).described(live=4)


def test_spare_slots_need_ranks_that_outlive_a_loss(tiny: Tiny) -> None:
    for fields in ({"cluster__nodes": 2}, {"resilience__on_rank_loss": "stop"}):
        config = rank_config(tiny.path, 2, resilience__spare_slots="1", **fields)
        with pytest.raises(ConfigError, match=r"resilience\.spare_slots"):
            plan_group(config)
    with pytest.raises(ConfigError, match=r"resilience\.placement = 'f': must be empty without spare slots"):
        plan_group(rank_config(tiny.path, 2, resilience__spare_slots="0", resilience__placement="f"))
    with pytest.raises(ConfigError, match="max_ranks"):
        rank_config(tiny.path, 2, parallel__max_ranks=1)
    with pytest.raises(ConfigError, match=r"max_ranks = 4: .* unless cluster\.nodes = 1"):
        rank_config(tiny.path, 2, parallel__max_ranks=4, cluster__nodes=2)


def test_gpus_may_have_more_ranks_later(tiny: Tiny) -> None:
    """But not with rows of float32, which no joining rank can take over."""
    fields = {"parallel__device": "cuda", "parallel__max_ranks": 4}
    config = rank_config(tiny.path, 2, model__dtype="bfloat16", **fields)
    plan = plan_group(config, available=1 << 30)
    assert plan.exchange.num_ranks == 4 and plan.placement is not None and plan.placement.num_ranks == 4
    with pytest.raises(ConfigError, match=r"max_ranks = 4: must be 0 or parallel\.ranks for float32"):
        plan_group(rank_config(tiny.path, 2, model__dtype="float32", **fields), available=1 << 30)


@pytest.mark.asyncio
async def test_experts_move_while_tokens_are_drawn(tiny: Tiny) -> None:
    """Oracle: the tokens of transformers; every row of every layer is counted once for its expert."""
    config = rank_config(tiny.path, 2, **SLOTS)
    plan, heard = plan_group(config), Recorder()
    ranks = RankProcesses(config)
    assert plan.placement is not None
    await ranks.start(heard, heard.on_progress)
    try:
        work = [greedy(n, tiny.prompts[n % len(tiny.prompts)], NEW) for n in range(1, 5)]
        for request in work:
            ranks.submit(request.number % 2, request)
        ranks.order(PreparePlacement(1, moved(plan.placement)), 1)
        await heard.until(lambda: len(answers(heard, 1)) == 2)
        ranks.order(SwitchChange(1), 2)
        await heard.until(lambda: len(answers(heard, 2)) == 2)
        assert [done.error for done in (*answers(heard, 1), *answers(heard, 2))] == [""] * 4
        # Slots that serve are not written to.
        ranks.order(PreparePlacement(2, overwriting(moved(plan.placement))), 3)
        await heard.until(lambda: len(answers(heard, 3)) == 2)
        assert any("serves an expert" in done.error for done in answers(heard, 3))
        await heard.until(lambda: len(heard.finished) == len(work), 60)
        for request in work:
            expected = tiny.tokens[request.number % len(tiny.prompts)]
            assert tuple(heard.tokens[request.number]) == expected[:NEW]
        await asyncio.sleep(0)
        ranks.order(CountExperts(), 4)
        await heard.until(lambda: len(answers(heard, 4)) == 2)
        rows = [done.rows for done in answers(heard, 4)]
        layers = len(rows[0]) // EXPERTS
        tokens = [sum(sum(own[layer * EXPERTS :][:EXPERTS]) for own in rows) for layer in range(layers)]
        assert len(set(tokens)) == 1 and tokens[0] % TOP_K == 0
        run = sum(len(request.prompt_ids) + len(heard.tokens[request.number]) - 1 for request in work)
        assert tokens[0] >= TOP_K * run  # and the warm-up
    finally:
        await ranks.stop()
    assert heard.lost == []


def answers(heard: Recorder, number: int) -> list:
    return [done for _, done in sorted(heard.done, key=lambda one: one[0]) if done.number == number]


def overwriting(placement: Placement) -> Placement:
    experts = tuple((row[1], row[0], *row[2:]) for row in placement.experts)
    return Placement(placement.num_experts, placement.slots_per_rank, experts, placement.serves)
