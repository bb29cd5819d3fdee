"""A kernel of one's own, as small as it can be: paged logits over bf16 pages, one page at a time, in plain torch.

    parity gate --impl examples/own_kernel.py:logits --layout bf16 --profile smoke

Break a line (read page 0 for all, leave the last page out, drop a head) and run it again to see what a failure says.
"""

import torch

PAGE = 64


def logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    """float32 [B * next_n, max_context_len]; the arguments are described in docs/concepts.md."""
    requests, next_n = q.shape[:2]
    result = q.new_full((requests * next_n, max_context_len), float("-inf"), dtype=torch.float32)
    for row in range(requests * next_n):
        request, length = row // next_n, int(context_lens.flatten()[row])
        query = q[request, row % next_n].float()
        for first in range(0, length, PAGE):
            count = min(PAGE, length - first)
            page = int(block_table[request, first // PAGE])
            keys = kv_cache[page, :count, 0].float()
            scores = torch.relu(query @ keys.t())
            result[row, first : first + count] = weights[row] @ scores
    return result


# Each row is computed by itself, but a matrix product may add in another order at another size: no promise of bits.
logits.parity_contract = {"layout": "bf16", "arithmetic": "ieee", "batch_invariant": False}
