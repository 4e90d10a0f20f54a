"""[10] Turns changes of prefix caches into batches of VllmEngine."""

from __future__ import annotations

from typing import Any

from ep_server.frontend.doors.vllm_engine.protocol import common
from ep_server.records import KvBlocksRemoved, KvBlocksStored, KvEvent, KvEventBatch


def event_batch(batch: KvEventBatch) -> Any:
    """The message of one batch of a rank."""
    message = common.KvEventBatch(
        sequence_number=batch.sequence_number,
        timestamp=batch.timestamp,
        events=[_event(event, batch.block_size) for event in batch.events],
        dp_rank=batch.rank,
    )
    if batch.snapshot is not None:
        part = batch.snapshot
        message.snapshot.index, message.snapshot.count = part.index, part.count
        message.snapshot.blocks = part.blocks
    return message


def _event(event: KvEvent, size: int) -> Any:
    if isinstance(event, KvBlocksStored):
        return common.KvCacheEvent(stored=_stored(event, size))
    if isinstance(event, KvBlocksRemoved):
        removed = common.KvBlocksRemoved(block_hashes=event.block_hashes, tier=common.KV_CACHE_TIER_DEVICE)
        return common.KvCacheEvent(removed=removed)
    return common.KvCacheEvent(cleared=common.KvCacheCleared())


def _stored(event: KvBlocksStored, size: int) -> Any:
    blocks = [
        common.KvBlock(
            block_hash=block, token_ids=event.token_ids[at * size : (at + 1) * size], block_size=size
        )
        for at, block in enumerate(event.block_hashes)
    ]
    stored = common.KvBlocksStored(blocks=blocks, tier=common.KV_CACHE_TIER_DEVICE)
    if event.parent_hash is not None:
        stored.parent_block_hash = event.parent_hash
    if event.cache_salt:
        stored.cache_salt = event.cache_salt
    return stored
