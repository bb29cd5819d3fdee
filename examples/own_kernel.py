"""A kernel of your own, as small as it can be: paged logits over bf16 pages in plain torch.

    parity gate --impl examples/own_kernel.py:logits --layout bf16 --profile smoke

It passes on a CPU and on a GPU. Break a line (read the wrong page, round the length down to whole pages, drop a head)
and run it again to see what a failure says.
"""

import torch

PAGE = 64  # slots per page
CHUNK = 1 << 16  # keys gathered at a time, which bounds the memory: 48 MiB of keys, and 32 of dots at 64 heads


def logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    """float32 [B * next_n, max_context_len]; the arguments are described in docs/operations/paged_logits.md.

    Every shape follows from other shapes and the lengths stay on the device, so a CUDA graph can capture the call."""
    requests, next_n = q.shape[:2]
    result = q.new_full((requests * next_n, max_context_len), float("-inf"), dtype=torch.float32)
    rows, keys = torch.arange(requests * next_n, device=q.device), torch.arange(max_context_len, device=q.device)
    keys = keys[: block_table.shape[1] * PAGE]
    for row in rows[:, None].split(max(1, CHUNK // max(1, len(keys)))):
        request, draft = row // next_n, row % next_n
        for key in keys.split(CHUNK):
            visible = key < context_lens[request, draft]
            page = block_table[request, key // PAGE].where(visible, 0)  # entries past the length may be rubbish
            k = kv_cache[page.long(), key % PAGE, 0].float()
            dots = q[request, draft].squeeze(1).float() @ k.mT
            scores = (weights[row] @ torch.relu(dots)).squeeze(1)
            result[row, key] = scores.where(visible, float("-inf"))
    return result


# A matrix product may add in another order at another size, so a row's bits may depend on the other rows.
logits.parity_contract = {"layout": "bf16", "arithmetic": "ieee", "batch_invariant": False}
