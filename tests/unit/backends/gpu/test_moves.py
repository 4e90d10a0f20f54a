"""Rows are counted for the expert that a slot held when they came. A GPU reads the counts late."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ep_server.backends.gpu.moves import ExpertMoves
from ep_server.errors import InternalError
from ep_server.models.slots import SlotTable
from ep_server.records import EMPTY, WAYS

ROUTES = np.zeros((1, 3, WAYS), dtype=np.int64)


def test_rows_belong_to_the_experts_held_then() -> None:
    total = torch.zeros(1, 2, dtype=torch.int64)
    moves = ExpertMoves(SlotTable(1, 3), 3, total, 10.0)
    assert moves.rows() is None
    moves.place(ROUTES, [[0, EMPTY]])
    total += torch.tensor([[5, 0]])
    moves.place(ROUTES, [[0, 2]])
    total += torch.tensor([[1, 7]])  # before anybody has asked
    rows = moves.rows()
    assert rows is not None
    assert rows.of(total.numpy()).tolist() == [[6, 0, 7]]
    moves.place(ROUTES, [[1, 2]])
    moves.place(ROUTES, [[1, 0]])
    total += torch.tensor([[10, 100]])
    rows = moves.rows()
    assert rows is not None
    assert rows.of(total.numpy()).tolist() == [[106, 10, 7]]


def test_experts_that_stay_cannot_be_placed() -> None:
    moves = ExpertMoves(None, 3, torch.zeros(1, 2, dtype=torch.int64), 10.0)
    with pytest.raises(InternalError, match="cannot move"):
        moves.place(ROUTES, [[0, 1]])
