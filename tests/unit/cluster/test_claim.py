"""Which nodes may be one server: what must agree, what may differ, and what the refusal says."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ep_server
from ep_server.cluster.claim import (
    MAX_HELLO,
    SHOWN,
    Claim,
    TensorHeader,
    claim_in,
    claim_of,
    differences,
    fingerprint,
    hello_of,
    must_agree,
    refusal,
)
from ep_server.config import Config, fields
from ep_server.errors import InvalidArgument
from ep_server.v1 import nodes_pb2 as pb

MODEL = Path(ep_server.__file__).parent / "assets" / "demo_model"
OPTIONS = [name for name, _, _ in fields()]
OWN_AFFAIR = {
    "model.path",
    "model.name",
    "parallel.threads_per_rank",
    "cluster.node_rank",
    "cluster.rendezvous",
    "cluster.hostfile",
    "handoff.host",
    "cluster.token_file",
    "cluster.tls_cert",
    "cluster.tls_key",
    "cluster.tls_ca",
    "cluster.connect_seconds",
    "fabric.library",
    "fabric.domain",
    "fabric.address",
    "fabric.interface",
    "fabric.gid_index",
}
TENSORS = [
    TensorHeader("model.embed_tokens.weight", "BF16", (8, 4), 64),
    *(TensorHeader(f"model.layers.{n}.{part}.weight", "F32", (4, 4), 64) for n in (0, 1) for part in "ab"),
]


def claim(node: int = 0, **changed: Any) -> Claim:
    """changed: fields of Claim, or options by their dotted names with __ for the dot."""
    options = {name.replace("__", "."): changed.pop(name) for name in list(changed) if "__" in name}
    made = Claim(node, "1.0", Config().values() | options, fingerprint({"hidden_size": 4}, TENSORS))
    return replace(made, **changed)


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_must_agree_but_for_a_node_s_own_affairs(option: str) -> None:
    ours = Config().values()[option]
    other = claim(1, config=Config().values() | {option: "something else"})
    own = option in OWN_AFFAIR or option.partition(".")[0] in {"grpc", "metrics", "log"}
    assert must_agree(option) is not own
    assert differences(claim(), other) == (
        [] if own else [f"{option} = 'something else', node 0 has {ours!r}"]
    )


def test_an_option_that_only_one_side_knows_is_a_difference() -> None:
    more = Config().values() | {"scheduler.new": 1}
    assert differences(claim(), claim(1, config=more)) == ["scheduler.new = 1, node 0 has 'absent'"]
    assert differences(claim(config=more), claim(1)) == ["scheduler.new = 'absent', node 0 has 1"]


def test_another_version_is_the_only_thing_said() -> None:
    other = claim(1, version="1.1", scheduler__block_size=32)
    assert differences(claim(), other) == ["version 1.1, node 0 has 1.0"]


def test_models_are_compared_by_config_and_layer_headers() -> None:
    changed = [*TENSORS[:-1], replace(TENSORS[-1], shape=(2, 8))]
    other = claim(1, model=fingerprint({"hidden_size": 8}, changed))
    description, layer = differences(claim(), other)
    assert description == "model: config.json hidden_size = 8, node 0 has 4"
    assert layer.startswith("model: tensors model.layers.1 = 2 tensors, 128 bytes, ")


@given(order=st.permutations(TENSORS))
def test_tensor_order_and_model_notes_do_not_matter(order: list[TensorHeader]) -> None:
    noted = {"hidden_size": 4, "_name_or_path": "/elsewhere", "transformers_version": "9"}
    assert fingerprint(noted, order) == fingerprint({"hidden_size": 4}, TENSORS)


@given(index=st.integers(0, len(TENSORS) - 1), field=st.sampled_from(["name", "dtype", "shape", "nbytes"]))
def test_every_field_of_every_header_counts(index: int, field: str) -> None:
    other = {"name": "model.layers.0.z.weight", "dtype": "F16", "shape": (16,), "nbytes": 63}[field]
    changed = [*TENSORS]
    changed[index] = replace(changed[index], **{field: other})
    assert fingerprint({}, changed) != fingerprint({}, TENSORS)
    assert fingerprint({}, TENSORS[:index] + TENSORS[index + 1 :]) != fingerprint({}, TENSORS)


def test_a_node_that_agrees_may_join() -> None:
    assert refusal(claim(), claim(2), nodes=4, joined=[1, 3]) == ""


@pytest.mark.parametrize(
    ("node", "joined", "expected"),
    [
        (0, [], "cluster.node_rank = 0: must be 1 to 3, node 0 has 4 nodes"),
        (4, [], "cluster.node_rank = 4: must be 1 to 3, node 0 has 4 nodes"),
        (2, [1, 2], "cluster.node_rank = 2: another node joined under this number"),
    ],
)
def test_numbers_are_within_the_server_and_given_once(node: int, joined: list[int], expected: str) -> None:
    assert refusal(claim(), claim(node), nodes=4, joined=joined) == expected


def test_the_refusal_names_the_node_and_both_values() -> None:
    other = claim(1, scheduler__block_size=32)
    assert refusal(claim(), other, 2, []) == "node 1: scheduler.block_size = 32, node 0 has 16"


def test_a_long_refusal_is_cut() -> None:
    other = claim(1, config=dict.fromkeys(OPTIONS, "x"))
    found = differences(claim(), other)
    assert len(found) > SHOWN
    assert refusal(claim(), other, 2, []).endswith(f"; and {len(found) - SHOWN} more")


def test_checkpoint_claim_survives_the_wire_unchanged() -> None:
    config = Config.from_values({"model.path": str(MODEL), "cluster.nodes": 2, "cluster.node_rank": 1})
    made, _ = claim_of(config)
    assert (made.node, made.version) == (1, ep_server.__version__)
    assert made.model["config.json hidden_size"] == 128
    assert any(name.startswith("tensors model.layers.") for name in made.model)
    assert claim_in(pb.Hello.FromString(hello_of(made).SerializeToString())) == made


def test_a_model_of_random_weights_is_its_description_alone(tmp_path: Path) -> None:
    shutil.copy(MODEL / "config.json", tmp_path)
    made, _ = claim_of(Config.from_values({"model.path": str(tmp_path), "model.load_format": "dummy"}))
    assert made.model["config.json hidden_size"] == 128
    assert not any(name.startswith("tensors ") for name in made.model)


def test_refusal_is_one_short_line_for_any_claim() -> None:
    odd = "x" * 10_000 + "\n"
    for other in (
        claim(1, version=odd),
        claim(1, scheduler__block_size=odd),
        claim(1, config={odd: 1}),
        claim(1, model={odd: odd}),
        claim(1, model={"config.json hidden_size": "4\nnode 2 has joined"}),
    ):
        line = refusal(claim(), other, 2, [])
        assert line.isprintable() and 0 < len(line) < 4096


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000, "1" * 100_000])
def test_what_is_no_claim_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match="hello"):
        claim_in(pb.Hello(node=1, config_json=text, model_json="{}"))


def test_oversized_hello_is_refused_before_parsing() -> None:
    hello = pb.Hello(node=1, config_json="[" * MAX_HELLO, model_json="{}")
    with pytest.raises(InvalidArgument, match=rf"{MAX_HELLO + 2} characters': must be at most {MAX_HELLO}"):
        claim_in(hello)
