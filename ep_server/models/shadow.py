"""The host shadow: a copy of all experts in memory of the front, which outlives any rank.

An entry holds one expert of a layer as a rank's slot holds it, so loading it is a plain copy. Needs no torch.
Units: bytes.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from ep_server.models.families.spec import ModelSpec
from ep_server.models.footprint import footprint
from ep_server.models.sizes import Dtype

PAGE = 4096  # entries begin on pages, so that each can be pinned alone
_TAG = 4


@dataclass(frozen=True, slots=True)
class ShadowLayout:
    """First a tag of each entry, int32, which says whose weights it holds; then the entries, by layer.

    sparse: by layer, whether it has experts. entries: of a layer. expert_bytes: of one entry.
    """

    sparse: tuple[bool, ...]
    entries: int
    expert_bytes: int

    @staticmethod
    def of(spec: ModelSpec, dtype: Dtype, *, packed: bool) -> ShadowLayout:
        """For all experts of a model. packed: as CPU ranks keep them, else as GPU ranks do."""
        held = footprint(spec, dtype, packed=packed)
        return ShadowLayout(tuple(map(bool, spec.sparse_layers)), spec.router.num_experts, held.expert)

    @property
    def count(self) -> int:
        """Entries of all layers."""
        return sum(self.sparse) * self.entries

    @property
    def pitch(self) -> int:
        """From one entry to the next."""
        return _whole(self.expert_bytes)

    @property
    def nbytes(self) -> int:
        """All of it."""
        return self.tag_bytes + self.count * self.pitch

    @property
    def tag_bytes(self) -> int:
        """Where the entries begin."""
        return _whole(self.count * _TAG)

    def described(self) -> str:
        """For people."""
        mib = self.nbytes / 2**20
        size = f"{mib / 1024:,.2f} GiB" if mib >= 1024 else f"{mib:,.1f} MiB"
        return f"host shadow: {size} of host memory for a copy of all experts"

    def number(self, layer: int, entry: int) -> int:
        """The place of an entry among all."""
        return sum(self.sparse[:layer]) * self.entries + entry


def create_shadow(layout: ShadowLayout) -> int:
    """Memory for a shadow, without pages yet. Returns: a descriptor, close-on-exec. Raises: OSError."""
    fd = os.memfd_create("ep_server_shadow", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, layout.nbytes)
    except OSError:
        os.close(fd)
        raise
    return fd


def _whole(size: int) -> int:
    """In whole pages."""
    return -(-size // PAGE) * PAGE
