"""A user's own store function, loaded by file in a worker process and judged with the contract that it carries."""

from dataclasses import replace

import pytest

from parity.domain.profiles import profile
from parity.ops.check import find_check
from parity.results import Status
from parity.run import registry
from parity.run.worker import opened
from parity.selftest.helpers import CPU
from parity.suite.search import run_check

SOURCE = """
import torch


def chain(pooled, norm_weight, eps, positions, rope_table, rounded):
    a = rounded(pooled.float())
    y = rounded(a * torch.rsqrt(a.square().mean(1, keepdim=True) + eps) * norm_weight.float())
    rows = rope_table[positions.long()]
    re, im, c, s = y[:, 64::2], y[:, 65::2], rows[:, 0::2], rows[:, 1::2]
    y = torch.cat((y[:, :64], rounded(torch.stack((re * c - im * s, re * s + im * c), -1).flatten(1))), 1)
    stride = 1
    while stride < 128:
        u, v = y.unflatten(1, (-1, 2, stride)).unbind(2)
        y = torch.stack((u + v, u - v), 2).flatten(1)
        stride *= 2
    return y * 128**-0.5


def write(z, out_loc, kv_cache):
    kept = out_loc >= 0
    page, row = out_loc[kept] // 64, out_loc[kept] % 64
    kv_cache[page, row, 0] = z[kept].bfloat16()


def good(pooled, norm_weight, eps, positions, rope_table, out_loc, kv_cache):
    write(chain(pooled, norm_weight, eps, positions, rope_table, lambda x: x), out_loc, kv_cache)


def published(pooled, norm_weight, eps, positions, rope_table, out_loc, kv_cache):
    bf16 = lambda x: x.bfloat16().float()
    write(chain(pooled, norm_weight, eps, positions, rope_table, bf16), out_loc, kv_cache)


published.parity_contract = {"op": "store", "layout": "bf16", "schedule": "published", "batch_invariant": True}


def mislabelled(**named):
    published(**named)


def writes_input(pooled, out_loc, kv_cache, **_):
    pooled.zero_()


def crashes(**_):
    raise RuntimeError("no such GPU")
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "mine.py"
    path.write_text(SOURCE)
    return path


def judged(source, name: str, check: str, **words):
    impl = registry.load(f"{source}:{name}", device=CPU, **words)
    with opened(impl, CPU) as runner:
        return run_check(
            find_check(check, impl.operation), runner, replace(profile("smoke"), shrink_seconds=1.0, reduce_calls=10)
        ).verdict


STORE = {"layout": "bf16", "op": "store"}


@pytest.mark.parametrize("check", ["layout/keys", "rounding/values", "invariance/slots"])
def test_a_right_store_passes(source, check):
    assert judged(source, "good", check, **STORE).passed


def test_its_own_contract_is_used(source):
    assert judged(source, "published", "rounding/values").passed
    verdict = judged(source, "mislabelled", "rounding/values", **STORE)
    assert verdict.status is Status.FAILED
    assert f"--impl {source}:mislabelled --op store --layout bf16" in verdict.repro


def test_what_breaks_the_convention_is_named(source):
    verdict = judged(source, "writes_input", "layout/keys", **STORE)
    assert verdict.status is Status.FAILED and "the call wrote pooled" in verdict.message
    verdict = judged(source, "crashes", "layout/keys", **STORE)
    assert verdict.status is Status.ERROR and "no such GPU" in verdict.message
