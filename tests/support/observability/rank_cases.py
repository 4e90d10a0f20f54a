"""Cases of the alerts on ranks and servers: late, lost, gone, restarting, stuck."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tests.support.observability.cases import AlertCases, Case, Series, constant, cut, steady, then


def waits(seconds: Sequence[float], steps: float = 600, minutes: int = 20) -> Series:
    """seconds: how long each other rank waits for rank 0, 1, ... in each of the last minutes."""
    found: Series = {}
    for rank in range(len(seconds)):
        found[f'epserver_ep_rank_up{{rank="{rank}"}}'] = constant(1, 10 + minutes)
        found[f'epserver_steps_total{{rank="{rank}"}}'] = steady(steps / len(seconds), 10 + minutes)
        found[f'epserver_step_seconds_sum{{phase="total", rank="{rank}"}}'] = steady(60, 10 + minutes)
        for peer, waited in enumerate(seconds):
            if peer != rank:
                labels = f'op="dispatch", peer="{peer}", rank="{rank}"'
                found[f"epserver_comm_peer_wait_seconds_total{{{labels}}}"] = then(0, waited, minutes, 10)
    return found


SLOW_RANK = AlertCases(
    fires={
        "one of four": Case(
            waits((1, 1, 12, 1)),
            {"peer": "2"},
            "Ranks of one:9400 spend 15% of their steps waiting for rank 2",
        ),
        "one of two, waited for alone": Case(
            waits((12, 0)), {"peer": "0"}, "Ranks of one:9400 spend 10% of their steps waiting for rank 0"
        ),
    },
    silent={
        "all wait for all": Case(waits((12, 12, 12, 12))),
        "late, but little": Case(waits((0.1, 0.1, 3, 0.1))),
        "hardly any steps": Case(waits((1, 1, 12, 1), steps=60)),
        "for four minutes": Case(waits((1, 1, 12, 1), minutes=4)),
    },
)


def nic_waits(shares: Sequence[tuple[float, float]], steps: float = 600, minutes: int = 25) -> Series:
    """shares: of the time that peers of (other nodes, the same node) wait for a rank at node 0's NIC, ..."""
    found: Series = {'epserver_steps_total{rank="0"}': steady(steps, 10 + minutes)}
    for node, waited in enumerate(shares):
        for peers, share in zip(("other_nodes", "same_node"), waited, strict=True):
            labels = f'node="{node}", domain="mlx5_0", direction="send", peers="{peers}"'
            name = f"epserver_nic_wait_seconds_total{{{labels}}}"
            found[name] = then(0, 60 * share, minutes, 10)
    return found


SLOW_NIC = AlertCases(
    fires={
        "as measured with 8 Mbit/s at node 1 of three": Case(
            nic_waits(((0.41, 0.06), (0.61, 0.05), (0.38, 0.05))),
            {"node": "1", "domain": "mlx5_0"},
            "Ranks of one:9400 wait 61% of the time for the NIC mlx5_0 of node 1",
        ),
        "one of three": Case(
            nic_waits(((0.04, 0), (0.12, 0.01), (0.04, 0))),
            {"node": "1", "domain": "mlx5_0"},
            "Ranks of one:9400 wait 12% of the time for the NIC mlx5_0 of node 1",
        ),
    },
    silent={
        "one of two, which look alike": Case(nic_waits(((0.12, 0), (0.12, 0)))),
        "as measured with equal NICs on too few cores": Case(
            nic_waits(((0.36, 0.26), (0.36, 0.29), (0.35, 0.26)))
        ),
        "all are slow": Case(nic_waits(((0.12, 0),) * 4)),
        "a slow rank, late for its own node too": Case(nic_waits(((0.04, 0), (0.12, 0.12), (0.04, 0)))),
        "slow, but little": Case(nic_waits(((0.001, 0), (0.03, 0), (0.001, 0)))),
        "hardly any steps": Case(nic_waits(((0.04, 0), (0.12, 0), (0.04, 0)), steps=6)),
        "for nine minutes": Case(nic_waits(((0.04, 0), (0.12, 0), (0.04, 0)), minutes=9)),
    },
)
RANK_DOWN = AlertCases(
    fires={
        "one": Case(
            {'epserver_ep_rank_up{rank="0"}': [1, 1, 1], 'epserver_ep_rank_up{rank="1"}': [1, 1, 0]},
            {"rank": "1"},
            "Rank 1 of one:9400 is not part of its group",
        ),
        "seen once, then the server was gone": Case(
            {'epserver_ep_rank_up{rank="1"}': [1, 1, 0, "stale"]},
            {"rank": "1"},
            "Rank 1 of one:9400 is not part of its group",
        ),
    },
    silent={"all up": Case({f'epserver_ep_rank_up{{rank="{rank}"}}': constant(1) for rank in range(4)})},
)
BUILD = 'epserver_build_info{version="1.0.0", model="demo"}'
DOWN = AlertCases(
    fires={
        "the only one": Case(
            {BUILD: [1] * 30 + ["stale"] + ["_"] * 9}, {}, "No server of demo answers scrapes"
        )
    },
    silent={
        "one of two": Case({BUILD: [1] * 30 + ["stale"] + ["_"] * 9, BUILD[:-1] + ', pod="b"}': constant(1)}),
        "a minute ago": Case({BUILD: [1] * 30 + ["stale", "_"]}),
        "removed long ago": Case({BUILD: [1] * 30 + ["stale"] + ["_"] * 90}),
        "up": Case({BUILD: constant(1)}),
    },
)
SECOND = BUILD[:-1] + ', pod="b"}'
REPLICA_DOWN = AlertCases(
    fires={
        "one of two, for 50 minutes": Case(
            {BUILD: constant(1, 171), SECOND: [1] * 120 + ["stale"] + ["_"] * 50},
            {},
            "demo had 2 servers for most of two hours and has fewer now",
        )
    },
    silent={
        "for three minutes": Case({BUILD: constant(1, 124), SECOND: [1] * 120 + ["stale"] + ["_"] * 3}),
        "after a rollout with one more": Case(
            {BUILD: constant(1, 150), SECOND: ["_"] * 120 + [1] * 10 + ["stale"] + ["_"] * 19}
        ),
        "removed long ago": Case({BUILD: constant(1, 300), SECOND: [1] * 100 + ["stale"] + ["_"] * 199}),
    },
)
STARTED = "process_start_time_seconds{}"
GONE = ["stale", "_"]  # no scrape saw why
RESTARTED = AlertCases(
    fires={
        "a rank was lost between two scrapes": Case(
            {
                BUILD: [1] * 10 + GONE + [1] * 5,
                STARTED: [1] * 10 + GONE + [2] * 5,
                'epserver_ep_rank_up{rank="0"}': [1] * 10 + GONE + [1] * 5,
            },
            {},
            "one:9400 ended and was started again in its place",
        )
    },
    silent={
        "another version": Case(
            {
                BUILD: [1] * 10 + ["stale"] + ["_"] * 6,
                BUILD.replace("1.0.0", "1.1.0"): ["_"] * 12 + [1] * 5,
                STARTED: [1] * 10 + GONE + [2] * 5,
            }
        ),
        "a new Pod": Case(
            {
                BUILD: [1] * 10 + ["stale"] + ["_"] * 6,
                STARTED: [1] * 10 + ["stale"] + ["_"] * 6,
                BUILD[:-1] + ', pod="b"}': ["_"] * 12 + [1] * 5,
                'process_start_time_seconds{pod="b"}': ["_"] * 12 + [2] * 5,
            }
        ),
        "a scrape was missed": Case({BUILD: [1, "_", 1, 1], STARTED: [1, "_", 1, 1]}),
        "long ago": Case({BUILD: constant(1, 30), STARTED: [1] * 10 + [2] * 20}),
        "some other program": Case({STARTED: [1] * 10 + [2] * 5}),
    },
)
LOSSES = 'epserver_rank_losses_total{rank="1"}'
LOST_AGAIN = AlertCases(
    fires={
        "twice": Case(
            {LOSSES: [0] * 10 + [1] * 3 + [2] * 3},
            {"rank": "1"},
            "Rank 1 of one:9400 was lost more than once within 10 minutes",
        )
    },
    silent={
        "once": Case({LOSSES: [0] * 10 + [1] * 5}),
        "an hour apart": Case({LOSSES: [0] * 10 + [1] * 60 + [2] * 5}),
        "one loss each": Case({LOSSES: [0] * 10 + [1] * 5, LOSSES.replace("1", "2"): [0] * 10 + [1] * 5}),
    },
)
NODES_OUT = "epserver_nodes_out{}"
NODE_OUT = AlertCases(
    fires={
        "one": Case(
            {NODES_OUT: [0] * 5 + [1] * 7}, {}, "one:9400 has gone on without 1 of its nodes for 5 minutes"
        )
    },
    silent={
        "back after a while": Case({NODES_OUT: [0] * 5 + [1] * 4 + [0] * 2}),
        "none": Case({NODES_OUT: [0] * 12}),
    },
)
RESTARTS = AlertCases(
    fires={
        "twice": Case(
            {BUILD: constant(1, 20), STARTED: [1] * 10 + [2] * 5 + [3] * 5},
            {},
            "one:9400 was started 2 times in 15 minutes",
        )
    },
    silent={
        "once, a deploy": Case({BUILD: constant(1, 20), STARTED: [1] * 10 + [2] * 10}),
        "some other program": Case({STARTED: [1] * 10 + [2] * 5 + [3] * 5}),
    },
)


def in_flight(running: float, waiting: float, steps: Iterable[float]) -> Series:
    return {
        "epserver_requests_running{}": constant(running, 30),
        "epserver_requests_waiting{}": constant(waiting, 30),
        'epserver_step_tokens_total{rank="0"}': list(steps),
    }


STALLED = AlertCases(
    fires={
        "stuck": Case(
            in_flight(3, 1, constant(5000, 30)),
            {},
            "one:9400 has 4 or more requests in flight and runs no step for them",
        )
    },
    silent={
        "at work": Case(in_flight(3, 1, steady(500, 30))),
        "idle": Case(in_flight(0, 0, constant(5000, 30))),
        "just started": Case(cut(in_flight(3, 1, constant(5000, 30)), 2)),
    },
)

CASES = {
    "EpServerSlowNic": SLOW_NIC,
    "EpServerSlowRank": SLOW_RANK,
    "EpServerRankDown": RANK_DOWN,
    "EpServerRankLostAgain": LOST_AGAIN,
    "EpServerNodeOut": NODE_OUT,
    "EpServerDown": DOWN,
    "EpServerReplicaDown": REPLICA_DOWN,
    "EpServerRestarted": RESTARTED,
    "EpServerRestartLoop": RESTARTS,
    "EpServerStalled": STALLED,
}
