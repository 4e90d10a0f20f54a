"""Which cases the exchange benchmark on GPUs runs, and in which order. Knows no GPU.

Without options the order is that of importance, so a run that is cut off has measured what matters most:
the sizes of the targets at EP4 and EP2; weights only at combine and rows of low precision; skewed and
all-to-one routing; the other sizes; one GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from exchange_case import Case

TOKENS = (1, 8, 16, 32, 64, 128, 200, 256)
FIRST = (128, 64, 16, 1)  # tokens of the targets
RANKS = (4, 2, 1)
WIRES = ("log10", "fp8")
SKEWED = ("zipf", "one")
QUICK = {4: FIRST, 2: (128,), 1: (1,)}


@dataclass(frozen=True)
class Asked:
    """What the options say; empty = not given. `common` has the fields that are the same in every case."""

    common: Case
    ranks: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    routings: tuple[str, ...] = ()
    wires: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    quick: bool = False
    overlap: bool = False

    @property
    def chosen(self) -> bool:
        """Whether a part of the table was asked for instead of all of it."""
        return any((self.tokens, self.routings, self.wires, self.forms))


def cases_of(asked: Asked, gpus: int) -> list[Case]:
    """In the order in which they run.

    Args:
        gpus: of this machine. Rank counts that were not asked for by name are left out where they do not fit.
    Raises: ValueError where a rank count that was asked for does not fit, or none does.
    """
    ranks = asked.ranks or tuple(count for count in RANKS if count <= gpus)
    if not ranks or max(ranks) > gpus:
        raise ValueError(f"--ranks {max(ranks or RANKS)} needs as many GPUs, here are {gpus}")
    if asked.overlap:
        return _product(asked, asked.ranks or ranks[:1], asked.tokens or (128,))
    if asked.quick:
        known = [count for count in ranks if count in QUICK] or ranks
        return [case for n in known for case in _product(asked, (n,), asked.tokens or QUICK.get(n, FIRST))]
    if asked.chosen:
        return _product(asked, ranks, asked.tokens or FIRST + _others(FIRST))
    return list(dict.fromkeys(_everything(asked, ranks)))


def _product(asked: Asked, ranks: tuple[int, ...], tokens: tuple[int, ...]) -> list[Case]:
    choices = (asked.routings or ("uniform",), asked.forms or ("own",), asked.wires or ("bf16",))
    return [
        replace(asked.common, ranks=n, tokens=t, routing=routing, form=form, wire=wire)
        for n, t, routing, form, wire in product(ranks, tokens, *choices)
    ]


def _everything(asked: Asked, ranks: tuple[int, ...]) -> list[Case]:
    several, plain = tuple(n for n in ranks if n > 1), replace(asked, ranks=())
    variants = [
        variant
        for n in several
        for variant in (
            _product(replace(plain, forms=("deepep",)), (n,), (128,)),
            _product(replace(plain, wires=WIRES), (n,), (128,)),
        )
    ]
    return [
        *_product(plain, several, FIRST),
        *(case for variant in variants for case in variant),
        *_product(replace(plain, routings=SKEWED), several, (128, 16)),
        *_product(plain, several, _others(FIRST)),
        *(_product(plain, (1,), FIRST + _others(FIRST)) if 1 in ranks else ()),
    ]


def _others(tokens: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(t for t in TOKENS if t not in tokens)
