"""A happens-before checker for code that enqueues work on GPU streams, on a machine without a GPU.

Inside `watched()` torch.cuda's streams and events are stand-ins, and operations run at once on the CPU.
Each is noted with the timeline that it would run on (a stream, or the host) and the bytes that it reads and
writes. Two accesses to the same bytes, one of them a write, must be ordered by a stream, by an event, or by
the host's wait for one; else it is a race, whatever the values were. Memory of a GPU is what torch.empty
was asked for with a device, and what is computed from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

HOST = "host"
WAITING = {"aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2", "aten::repeat_interleave.Tensor"}
Clock = Counter[str]  # of each timeline, how much of it has happened before


@dataclass
class Access:
    """One timeline's use of bytes begin to end of a piece of memory."""

    timeline: str
    tick: int
    begin: int
    end: int
    writes: bool
    what: str


class Stream:
    """Stands for torch.cuda.Stream."""

    def __init__(self, races: Races, name: str) -> None:
        self.races, self.name, self.device = races, name, torch.device("cpu")
        self.clock: Clock = Counter()

    def record_event(self) -> Event:
        return Event(self.races, self.clock | self.races.host)

    def wait_event(self, event: Event) -> None:
        self.clock |= event.clock | self.races.host

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())


class Event:
    """Stands for torch.cuda.Event. Not there yet when it is first asked."""

    def __init__(self, races: Races, clock: Clock) -> None:
        self.races, self.clock, self.asked = races, clock, False

    def query(self) -> bool:
        there, self.asked = self.asked, True
        if there:
            self.races.host |= self.clock
        return there


class Races(TorchDispatchMode):
    """All that was noted. found: what raced with what, and what waited for a GPU unasked."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.host: Clock = Counter()
        self.streams = {"caller": Stream(self, "caller")}
        self.current = self.streams["caller"]
        self.of_gpu: set[int] = set()  # addresses of memory
        self.accesses: dict[int, list[Access]] = {}
        self.kept: list[torch.UntypedStorage] = []  # so that no address comes twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given, returned = tensors((args, kwargs)), tensors(result)
        gpu = any(address(each) in self.of_gpu for each in given)
        made = [each for each in returned if address(each) not in {address(other) for other in given}]
        self.kept += [each.untyped_storage() for each in made]
        if gpu:
            self.of_gpu |= {address(each) for each in made if each.numel()}
        if func.is_view or "empty" in func.name():
            return result
        if gpu and func.name() in WAITING:
            self.found.append(f"{func.name()} waits for the GPU")
        writes = made + written(func, args, kwargs)
        reads = [each for each in given if not any(each is other for other in writes)]
        self.note(self.current.name if gpu else HOST, reads, writes, func.name())
        return result

    def note(self, timeline: str, reads: list[torch.Tensor], writes: list[torch.Tensor], what: str) -> None:
        """One operation of a timeline, begun by the host now."""
        clock = self.host if timeline == HOST else self.streams[timeline].clock
        clock |= self.host
        clock[timeline] += 1
        for each in reads:
            self.access(each, Access(timeline, clock[timeline], *span(each), False, what), clock)
        for each in writes:
            self.access(each, Access(timeline, clock[timeline], *span(each), True, what), clock)

    def access(self, tensor: torch.Tensor, new: Access, clock: Clock) -> None:
        """Notes it, and a race with any earlier one that this clock does not know of."""
        if new.begin == new.end:
            return
        earlier = self.accesses.setdefault(address(tensor), [])
        for old in earlier:
            overlap = old.begin < new.end and new.begin < old.end
            if overlap and (old.writes or new.writes) and clock[old.timeline] < old.tick:
                self.found.append(f"{old.what} on {old.timeline} and {new.what} on {new.timeline}")
        earlier.append(new)


def tensors(tree: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(tree) if isinstance(each, torch.Tensor)]


def written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Arguments that an operation writes."""
    arguments = func._schema.arguments
    values = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
    return [
        values[each.name]
        for each in arguments
        if each.alias_info is not None and each.alias_info.is_write and values.get(each.name) is not None
    ]


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def span(tensor: torch.Tensor) -> tuple[int, int]:
    """Bytes of its memory that it lies within."""
    if tensor.numel() == 0:
        return 0, 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.storage_offset()
    size = tensor.element_size()
    return begin * size, (begin + last + 1) * size


@contextmanager
def watched(replace: Callable[..., None]) -> Iterator[Races]:
    """Everything inside is noted. replace(object, name, value): monkeypatch.setattr."""
    races = Races()
    empty = torch.empty

    def stream(*_: Any, **__: Any) -> Stream:
        name = f"stream {len(races.streams)}"
        return races.streams.setdefault(name, Stream(races, name))

    def allocate(*sizes: Any, pin_memory: bool = False, device: Any = None, **options: Any) -> torch.Tensor:
        made = empty(*sizes, **options)
        races.kept.append(made.untyped_storage())
        if device is not None and made.numel():
            races.of_gpu.add(address(made))
        return made

    @contextmanager
    def on(chosen: Stream) -> Iterator[None]:
        before, races.current = races.current, chosen
        try:
            yield
        finally:
            races.current = before

    replace(torch, "empty", allocate)
    replace(torch.cuda, "Stream", stream)
    replace(torch.cuda, "stream", on)
    replace(torch.cuda, "current_stream", lambda *_: races.current)
    replace(torch.cuda, "is_current_stream_capturing", lambda: False)
    replace(torch.Tensor, "record_stream", lambda *_: None)
    with races:
        yield races
