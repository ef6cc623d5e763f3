"""The oracle: attention by its definition, one request at a time.

It reads the requests' own q, k and v, and knows no cache, no metadata, no padding and no backend.
"""

from kits.reference.attention import attention
from kits.reference.masks import causal_mask, draft_mask, draft_positions, positions, tree_mask

__all__ = ["attention", "causal_mask", "draft_mask", "draft_positions", "positions", "tree_mask"]
