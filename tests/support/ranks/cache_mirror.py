"""What a subscriber knows of one rank's prefix cache: the replay of its events, with every rule checked."""

from __future__ import annotations

from dataclasses import dataclass, field

from ep_server.records import KvBlocksRemoved, KvBlocksStored, KvCacheCleared, KvEventBatch


@dataclass
class CacheMirror:
    """blocks: block hash -> (parent hash, token ids, salt). complete: a whole snapshot was applied."""

    blocks: dict[int, tuple[int | None, tuple[int, ...], str]] = field(default_factory=dict)
    complete: bool = False
    last: int = 0
    block_size: int = 0

    def apply(self, batch: KvEventBatch) -> None:
        """The next batch of this rank."""
        assert not self.last or batch.sequence_number == self.last + 1, "a batch is missing"
        self.last, self.block_size = batch.sequence_number, batch.block_size
        for event in batch.events:
            if isinstance(event, KvCacheCleared):
                self.blocks.clear()
            elif isinstance(event, KvBlocksRemoved):
                for block in event.block_hashes:
                    del self.blocks[block]
            else:
                self._store(event, batch.block_size)
        part = batch.snapshot
        if part is not None:
            assert part.index < part.count
            assert part.index or isinstance(batch.events[0], KvCacheCleared)
            if part.index == part.count - 1:
                self.complete = True
                assert len(self.blocks) == part.blocks

    def holds(self, token_ids: tuple[int, ...], salt: str = "") -> bool:
        """Whether every full block of a sequence is stored, each the child of the one before."""
        by_content = {content: block for block, content in self.blocks.items()}
        parent, size = None, self.block_size or len(token_ids)
        for start in range(0, len(token_ids) - size + 1, size):
            parent = by_content.get((parent, token_ids[start : start + size], salt))
            if parent is None:
                return False
        return parent is not None

    def _store(self, stored: KvBlocksStored, size: int) -> None:
        assert len(stored.token_ids) == size * len(stored.block_hashes) > 0
        parent = stored.parent_hash
        for index, block in enumerate(stored.block_hashes):
            assert block not in self.blocks, "a block was stored twice"
            tokens = stored.token_ids[index * size : (index + 1) * size]
            self.blocks[block] = (parent, tokens, stored.cache_salt)
            parent = block
