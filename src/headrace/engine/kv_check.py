"""The proof behind ``KVCache.check``: the books of both tiers against each other."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from headrace.backend.batch import BLOCK_SIZE, Int32
from headrace.engine.kv_group import KVGroup
from headrace.engine.prefix_cache import NO_BLOCK, CachedBlock
from headrace.errors import HeadraceError

if TYPE_CHECKING:
    from headrace.engine.kv_cache import KVCache


def check_kv_cache(kv: KVCache) -> None:
    """See :meth:`KVCache.check`."""
    cache = kv.prefix_cache
    blocks = cache.all_blocks()
    unused = cache.unused_blocks()
    _prove(set(unused) == {b for b in blocks if b.users == 0}, "the eviction queue is not the unused blocks")
    users = Counter(block for row in kv._sequences for block in kv._cached[row])
    _prove(all(b.users == users[b] for b in blocks), "a cached block's users are not its sequences")
    _prove(set(users) <= set(blocks), "a sequence uses a block that the cache has forgotten")
    place = {block: index for index, block in enumerate(unused)}
    for block in blocks:
        parent = block.parent
        _prove(parent is None or cache.holds(parent.key), "a cached block has lost its parent")
        if parent in place:
            _prove(block in place and place[block] < place[parent], "a parent would go before its child")
    _prove(cache.announced_rows() <= set(kv._sequences), "a block is announced by nobody")
    held = np.zeros(kv.max_sequences, np.int32)
    for row, seq in kv._sequences.items():
        held[row] = seq.num_slots // BLOCK_SIZE
    for group in kv.groups:
        _check_group(kv, group, held, blocks)
    for row, seq in kv._sequences.items():
        if kv._loads is None or row not in kv._loads.by_row:
            _prove(seq.num_loading == 0, f"row {row} waits for blocks that do not come")
    if kv.tier is not None and kv._loads is not None:
        for row, (seq, start, loading) in kv._loads.by_row.items():
            _prove(kv._sequences.get(row) is seq, "blocks come for nobody")
            _prove(
                (seq.num_computed_tokens, seq.num_loading)
                == ((start + loading.num_taken) * BLOCK_SIZE, loading.num_left * BLOCK_SIZE),
                f"row {row} waits for other blocks than come",
            )
        kv.tier.check()


def _check_group(kv: KVCache, group: KVGroup, held: Int32, blocks: list[CachedBlock]) -> None:
    where, pool, table = f"KV group {group.index}: ", group.pool, group.table
    index, first = np.arange(table.shape[1]), np.array(group.first)[:, None]
    own = index < held[:, None]
    _prove(not table[~own].any(), where + "a table has stale blocks")
    _prove(bool((table[index < first] == group.empty).all()), where + "a block outlived its window")
    for row, seq in kv._sequences.items():
        start = group.first[row]
        _prove(
            start == group.first_seen(seq.num_computed_tokens + seq.num_loading),
            where + f"row {row} keeps a wrong window",
        )
        prefix = [block.blocks[group.index] for block in kv._cached[row]]
        _prove(
            table[row, start : len(prefix)].tolist() == prefix[start:],
            where + f"row {row} strayed from its prefix",
        )
    references = np.bincount(table[own & (index >= first)], minlength=pool.num_blocks)
    _prove(references.tolist() == pool.references, where + "reference counts differ from the tables'")
    free, used = pool.free_blocks(), set(np.flatnonzero(references).tolist())
    here = [block for block in blocks if block.blocks[group.index] != NO_BLOCK]
    known = [block.blocks[group.index] for block in here]
    cached = set(known) - used
    idle = {block for block in here if block.blocks[group.index] in cached}
    _prove(group.window is None or set(group.idle) == idle, where + "idle blocks are not those unused")
    _prove(len(set(free)) == len(free), where + "a block is free twice")
    _prove(len(set(known)) == len(known), where + "a block is cached twice")
    _prove(not set(free) & (used | cached), where + "a block is free and in use")
    _prove(
        len(free) + len(cached) + len(used) == pool.num_blocks,
        where + f"{len(free)} free + {len(cached)} cached + {len(used)} used != {pool.num_blocks}",
    )


def _prove(holds: bool, what: str) -> None:
    if not holds:
        raise HeadraceError(f"The KV cache is inconsistent: {what}.")
