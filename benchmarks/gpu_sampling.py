"""Sampling of one step on one GPU: our kernels, FlashInfer's, and whether each draws what it should.

    python3 benchmarks/gpu_sampling.py [--batch 1,8,64,256] [--vocab 32000,151936] [--skip-checks]

Times are microseconds of the device per call, in a captured graph, median of replays. Every row has its own
temperature, top-k, top-p, min-p, seed and position, in tensors, as the rows of a server do. "peaked" logits
fall off as those of a language model. "flat" ones are normal: a nucleus holds tens of thousands of tokens.

The checks come first. They draw 102,400 tokens of one row per case and compare them with the exact
distribution. `outside` counts draws of removed tokens; `chi2/df` is near 1 for a correct sampler. Then they
ask of each sampler: is a call repeatable? Does each row's own seed count? Does a row draw the same token
alone as in a batch?

FlashInfer needs the packages flashinfer-python and apache-tvm-ffi, and nvcc with cuRAND's headers unless its
`sampling` and `topk` modules are compiled already. Without it only our kernels are timed.
"""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from gpu_timing import arguments, in_graph

from ep_server.backends.gpu.kernels.triton.sampling import sample
from ep_server.backends.gpu.kernels.triton.sampling_table import (
    DRAWN,
    MIN_P,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    WANTS,
    SamplingSpace,
    SamplingTable,
    Wants,
    splits_of,
)

try:
    from flashinfer import sampling as flashinfer
except ImportError:
    flashinfer = None

Draw = Callable[[], torch.Tensor]
DEVICE = "cuda"
OFF_K = 1 << 20  # more than any vocabulary: FlashInfer's way to turn top-k off


@dataclass(frozen=True)
class Setting:
    """What the rows ask for; top_k 0, top_p 1 and min_p 0 are off, temperature 0 is greedy."""

    name: str
    temperature: float = 0.8
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    @property
    def wants(self) -> Wants:
        if not self.temperature:
            return Wants.NOTHING
        if self.top_k:
            return Wants.FILTER
        return Wants.FILTER | Wants.NUCLEUS if self.top_p < 1 else Wants.DRAW


SETTINGS = [
    Setting("greedy", temperature=0.0),
    Setting("temperature"),
    Setting("top-k", top_k=50),
    Setting("top-p", top_p=0.9),
    Setting("top-k, top-p", top_k=50, top_p=0.9),
    Setting("min-p", min_p=0.05),
    Setting("all", top_k=50, top_p=0.9, min_p=0.05),
]


class Rows:
    """Logits and what both samplers need for them. seeds, offsets: [N] int64, one of each per row."""

    def __init__(self, logits: torch.Tensor, setting: Setting, seeds: torch.Tensor, position: int) -> None:
        count, vocab = logits.shape
        self.logits, self.setting = logits, setting
        # FlashInfer consumes up to 32 rounds of 4 numbers for a draw.
        self.seeds, self.offsets = seeds, torch.full_like(seeds, position * 128)
        self.table = SamplingTable.of(count, vocab, logits.device)
        for column, value in ((TEMPERATURE, setting.temperature), (TOP_P, setting.top_p)):
            self.table.floats[:, column.value] = value
        self.table.floats[:, MIN_P.value] = setting.min_p
        self.table.longs[:, TOP_K.value], self.table.longs[:, SEED.value] = setting.top_k, seeds
        self.table.longs[:, DRAWN.value], self.table.longs[:, WANTS.value] = position, int(setting.wants)
        self.space = SamplingSpace.of(count, vocab, splits_of(vocab), logits.device)
        self.slots = torch.arange(count, dtype=torch.int32, device=logits.device)
        self.tokens = torch.zeros(count, dtype=torch.int64, device=logits.device)
        full = torch.ones(count, device=logits.device)
        self.temperatures = full * setting.temperature
        self.top_p, self.min_p = full * setting.top_p, full * setting.min_p
        self.top_k = torch.full((count,), setting.top_k or OFF_K, dtype=torch.int32, device=logits.device)

    def ours(self) -> torch.Tensor:
        sample(self.logits, self.slots, self.table, self.space, self.tokens, self.setting.wants)
        return self.tokens

    def theirs(self) -> dict[str, Draw]:
        """FlashInfer's ways to the same distribution. "joint" applies top-p to the row before top-k."""
        if self.setting.name == "greedy":
            return {"torch.argmax": lambda: self.logits.argmax(dim=1)}
        if flashinfer is None:
            return {}
        seed = {"seed": self.seeds, "offset": self.offsets}
        return {
            "temperature": {
                "logits": lambda: flashinfer.sampling_from_logits(
                    self.logits / self.temperatures[:, None], **seed
                ),
                "probs": lambda: flashinfer.sampling_from_probs(self.probs(), **seed),
            },
            "top-k": {
                "probs": lambda: flashinfer.top_k_sampling_from_probs(self.probs(), self.top_k, **seed),
                "mask": lambda: flashinfer.sampling_from_probs(self.masked(), **seed),
                "one k": lambda: self.with_one_k(1.0, **seed),
            },
            "top-p": {
                "probs": lambda: flashinfer.top_p_sampling_from_probs(self.probs(), self.top_p, **seed),
            },
            "top-k, top-p": {
                "mask": lambda: flashinfer.top_p_sampling_from_probs(self.masked(), self.top_p, **seed),
                "joint": lambda: flashinfer.top_k_top_p_sampling_from_probs(
                    self.probs(), self.top_k, self.top_p, filter_apply_order="joint", **seed
                ),
                "one k": lambda: self.with_one_k(self.top_p, **seed),
            },
            "min-p": {
                "probs": lambda: flashinfer.min_p_sampling_from_probs(self.probs(), self.min_p, **seed),
            },
            "all": {
                "renorm": lambda: flashinfer.min_p_sampling_from_probs(
                    flashinfer.top_p_renorm_probs(self.masked(), self.top_p), self.min_p, **seed
                ),
            },
        }[self.setting.name]

    def probs(self) -> torch.Tensor:
        return flashinfer.softmax(self.logits, self.temperatures)

    def masked(self) -> torch.Tensor:
        return flashinfer.softmax(flashinfer.top_k_mask_logits(self.logits, self.top_k), self.temperatures)

    def with_one_k(self, top_p: torch.Tensor | float, **seed: torch.Tensor) -> torch.Tensor:
        """The fast path of a top-k that all rows share, which needs a number."""
        scaled = self.logits / self.temperatures[:, None]
        return flashinfer.top_k_top_p_sampling_from_logits(scaled, self.setting.top_k, top_p, **seed)

    def samplers(self) -> dict[str, Draw]:
        return {"ours": self.ours} | self.theirs()


def logits_of(shape: str, batch: int, vocab: int) -> torch.Tensor:
    if shape == "flat":
        return torch.randn(batch, vocab, device=DEVICE)
    rank = torch.arange(1, vocab + 1, device=DEVICE).float()
    fall = 12 - 1.5 * rank.log()
    rows = torch.stack([fall[torch.randperm(vocab, device=DEVICE)] for _ in range(batch)])
    return rows + 0.1 * torch.randn_like(rows)


def exact(logits: torch.Tensor, setting: Setting) -> torch.Tensor:
    """The distribution of one row, float64: top-k, top-p of what is left, min-p; equal weights together."""
    if not setting.temperature:
        return torch.nn.functional.one_hot(logits.argmax(), len(logits)).double()
    weights = torch.softmax(logits.double() / setting.temperature, 0)
    if setting.top_k:
        weights[weights < weights.topk(setting.top_k).values[-1]] = 0
    if setting.top_p < 1:
        ordered = weights.sort(descending=True).values / weights.sum()
        ahead = ordered.cumsum(0) - ordered
        least = ordered[ahead < setting.top_p][-1] * weights.sum()
        weights[weights < least * (1 - 1e-12)] = 0
    weights[weights < setting.min_p * weights.max()] = 0
    return weights / weights.sum()


def tried(name: str, work: Callable[[], str]) -> None:
    """One line, whatever happens: FlashInfer may refuse a case."""
    try:
        said = work()
    except Exception as error:
        said = f"failed: {type(error).__name__}: {str(error)[:120]}"
    print(f"    {name:14s} {said}", flush=True)


def check_distribution(setting: Setting, vocab: int, count: int = 4096, rounds: int = 25) -> None:
    torch.manual_seed(1)
    line = 3 * torch.randn(vocab, device=DEVICE)
    wanted = exact(line, setting)
    seeds = torch.randint(1 << 60, (rounds, count), device=DEVICE)
    logits = line.expand(count, vocab).contiguous()

    def drawn(name: str) -> str:
        found = torch.zeros(vocab, dtype=torch.int64, device=DEVICE)
        for index in range(rounds):
            tokens = Rows(logits, setting, seeds[index], index).samplers()[name]()
            found += torch.bincount(tokens.long(), minlength=vocab)
        outside = int(found[wanted == 0].sum())
        expected = wanted * count * rounds
        often = expected >= 5  # what is rarer goes into one cell
        groups = [(found[often].double(), expected[often])]
        groups.append((found[~often].sum()[None].double(), expected[~often].sum()[None]))
        seen, due = (torch.cat(parts) for parts in zip(*groups, strict=True))
        seen, due = seen[due > 0], due[due > 0]
        chi2 = float(((seen - due) ** 2 / due).sum()) / max(len(due) - 1, 1)
        return f"kept {int((wanted > 0).sum())}, outside {outside}, chi2/df {chi2:.2f}"

    print(f"  {setting.name}, {vocab} tokens")
    for name in Rows(logits[:1], setting, seeds[0, :1], 0).samplers():
        tried(name, lambda name=name: drawn(name))


def check_seeds(setting: Setting, batch: int = 64, vocab: int = 32000) -> None:
    """Of a batch of rows with the same logits and one seed each."""
    torch.manual_seed(2)
    logits = torch.randn(vocab, device=DEVICE).expand(batch, vocab).contiguous()
    seeds = torch.randint(1 << 60, (batch,), device=DEVICE)

    def told(name: str) -> str:
        def draw(part: slice, given: torch.Tensor) -> torch.Tensor:
            return Rows(logits[part], setting, given[part], 7).samplers()[name]().clone()

        every = slice(None)
        first, again = draw(every, seeds), draw(every, seeds)
        others = seeds.clone()
        others[1:] += 1
        changed = int((draw(every, others)[1:] != first[1:]).sum())
        alone = sum(int(draw(slice(i, i + 1), seeds)[0] == first[i]) for i in range(batch))
        rows = Rows(logits, setting, seeds, 6)
        work, graph = rows.samplers()[name], torch.cuda.CUDAGraph()
        work()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            out = work()
        rows.offsets.fill_(7 * 128)
        rows.table.longs[:, DRAWN.value] = 7
        graph.replay()
        return (
            f"repeatable {torch.equal(first, again)}, another seed changes {changed} of {batch - 1} rows, "
            f"alone as in the batch {alone} of {batch}, graph reads new positions {torch.equal(out, first)}"
        )

    print(f"  {setting.name}")
    for name in Rows(logits, setting, seeds, 7).samplers():
        tried(name, lambda name=name: told(name))


def check_ties() -> None:
    """Top-k of 2 where four tokens share the second place."""
    line = torch.zeros(32000, device=DEVICE) - 20
    line[100], line[torch.tensor([5, 50, 500, 5000], device=DEVICE)] = 3.0, 2.0
    logits, seeds = line.expand(2048, len(line)).contiguous(), torch.arange(2048, device=DEVICE)
    setting = Setting("top-k", temperature=1.0, top_k=2)
    rows = Rows(logits, setting, seeds, 0)
    for name, work in rows.samplers().items():
        tried(name, lambda work=work: f"draws {sorted(set(work().tolist()))}")


def check_broken_rows() -> None:
    """A row with NaN, one with +inf, and one of -inf alone."""
    logits = torch.randn(4, 32000, device=DEVICE)
    logits[0, 9], logits[1, 9], logits[2] = float("nan"), float("inf"), float("-inf")
    for setting in (SETTINGS[1], SETTINGS[3]):
        rows = Rows(logits, setting, torch.arange(4, device=DEVICE), 0)
        for name, work in rows.samplers().items():
            tried(f"{setting.name[:5]} {name}", lambda work=work: f"draws {work().tolist()}")


def times(rows: Rows) -> Iterator[tuple[str, str]]:
    """us of each sampler, or why there is none."""
    for name, work in rows.samplers().items():
        try:
            yield name, f"{in_graph(lambda _: work(), 1):.1f}"  # noqa: B023
        except Exception as error:
            yield name, type(error).__name__


def main() -> None:
    parser = arguments(__doc__, batch="1,8,64,256", vocab="32000,151936")
    parser.add_argument("--skip-checks", action="store_true")
    given = parser.parse_args()
    theirs = importlib.metadata.version("flashinfer-python") if flashinfer else "absent"
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, FlashInfer {theirs}", flush=True)
    if not given.skip_checks:
        print("distribution of 102,400 draws")
        for setting, vocab in itertools.product(SETTINGS[1:], (1000, 32000)):
            check_distribution(setting, vocab)
        print("seeds: 64 equal rows")
        for setting in SETTINGS[1:]:
            check_seeds(setting)
        print("ties: top-k of 2, four tokens are second")
        check_ties()
        print("broken rows: NaN, +inf, only -inf, a good one")
        check_broken_rows()
    print("| logits | vocab | batch | case | ours, us | FlashInfer, us |\n|---|---|---|---|---|---|")
    for shape, vocab, batch in itertools.product(("peaked", "flat"), given.vocab, given.batch):
        torch.manual_seed(3)
        logits = logits_of(shape, batch, vocab)
        for setting in SETTINGS:
            rows = Rows(logits, setting, torch.randint(1 << 60, (batch,), device=DEVICE), 5)
            found = dict(times(rows))
            ours = found.pop("ours")
            others = ", ".join(f"{name} {took}" for name, took in found.items()) or "-"
            print(f"| {shape} | {vocab} | {batch} | {setting.name} | {ours} | {others} |", flush=True)


if __name__ == "__main__":
    main()
