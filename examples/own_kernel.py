"""A kernel of one's own, as small as it can be: paged logits over bf16 pages, one row at a time, in plain torch.

    parity gate --impl examples/own_kernel.py:logits --layout bf16 --profile smoke

Break a line (read the wrong page, round the length down to whole pages, drop a head) and run it again to see what a
failure says.
"""

import torch

PAGE = 64


def logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    """float32 [B * next_n, max_context_len]; the arguments are described in docs/concepts.md."""
    requests, next_n = q.shape[:2]
    result = q.new_full((requests * next_n, max_context_len), float("-inf"), dtype=torch.float32)
    lengths = context_lens.flatten().tolist()
    for row, length in enumerate(lengths):
        request, draft = divmod(row, next_n)
        pages = block_table[request, : -(-length // PAGE)].long()
        keys = kv_cache[pages, :, 0].flatten(0, 1)[:length].float()
        scores = torch.relu(q[request, draft].float() @ keys.t())
        result[row, :length] = weights[row] @ scores
    return result


# Each row is computed by itself, but a matrix product may add in another order at another size: no promise of bits.
logits.parity_contract = {"layout": "bf16", "arithmetic": "ieee", "batch_invariant": False}
