"""What node 0 may ask of the ranks of another node, and when. No rank is started."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import ep_server
from ep_server.cluster.agent import Agent
from ep_server.cluster.link import Link
from ep_server.config import Config
from ep_server.errors import InvalidArgument
from ep_server.v1 import nodes_pb2 as pb

MODEL = Path(ep_server.__file__).parent / "assets" / "demo_model"


@pytest.fixture
async def agent() -> AsyncIterator[Agent]:
    """Of node 1 of two, with ranks 2 and 3."""
    values = {"model.path": str(MODEL), "cluster.nodes": 2, "cluster.node_rank": 1, "parallel.ranks": 2}
    config = Config.from_values(values)
    link = Link(lambda _: None, 60.0)
    made = Agent(config, link, lambda *_: None)
    made.on_message(pb.NodeMessage(plan=pb.Plan(group=1, nodes=[0, 1])))
    yield made
    await made.end()
    link.end("the test is over")


def signalled(rank: int, group: int = 1) -> pb.NodeMessage:
    return pb.NodeMessage(rank_signal=pb.RankSignal(rank=rank, number=signal.SIGTERM, group=group))


async def test_a_rank_that_is_not_started_yet_may_be_signalled(agent: Agent) -> None:
    """Node 0 ends a start that failed while this node still makes the memory of its ranks."""
    for rank in (2, 3):
        agent.on_message(signalled(rank))
    await agent.end()
    assert agent.pids == []


@pytest.mark.parametrize("rank", [1, 4])
async def test_a_rank_of_another_node_may_not(agent: Agent, rank: int) -> None:
    with pytest.raises(InvalidArgument, match=f"rank = {rank}"):
        agent.on_message(signalled(rank))


async def test_a_frame_for_a_rank_that_is_not_there_is_a_mistake(agent: Agent) -> None:
    with pytest.raises(InvalidArgument, match="rank = 2"):
        agent.on_message(pb.NodeMessage(rank_frame=pb.RankFrame(rank=2, payload=b"", group=1)))


async def test_orders_for_a_group_that_has_ended_are_ignored(agent: Agent) -> None:
    agent.on_message(pb.NodeMessage(end_ranks=pb.EndRanks(group=1)))
    agent.on_message(signalled(1))
    agent.on_message(pb.NodeMessage(spawn=pb.Spawn(group=1, kv_blocks=9)))
    await agent.end()
    assert agent.pids == []


@pytest.mark.parametrize("plan", [pb.Plan(group=1, nodes=[0, 1]), pb.Plan(group=2, nodes=[0, 2])])
async def test_a_plan_is_for_a_new_group_with_this_node(agent: Agent, plan: pb.Plan) -> None:
    with pytest.raises(InvalidArgument, match="a new group with node 1"):
        agent.on_message(pb.NodeMessage(plan=plan))
