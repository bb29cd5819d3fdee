"""The repro line of a failure of every check of every operation, executed, shows the same failure."""

import shlex

import pytest
import torch

from parity.cli.main import main
from parity.domain.profiles import profile
from parity.ops.check import Check, checks_of
from parity.run import registry
from parity.run.operation import all_operations, find
from parity.run.worker import Worker, opened
from parity.suite.search import run_check
from parity.vocabulary import Status

CPU = torch.device("cpu")
SOURCE = """
import torch

def raises(**named):
    raise RuntimeError("no luck today")

def paged_logits(q, kv_cache, weights, context_lens, block_table, max_context_len, clean_logits):
    return torch.full((context_lens.numel(), max_context_len), 3.0)

def topk(logits, context_lens, block_table, k):
    return (torch.zeros((len(logits), k), dtype=torch.int32),) * 2

def store(pooled, norm_weight, eps, positions, rope_table, out_loc, kv_cache):
    kv_cache[:1] = 1

def compressor(kv, score, ape, positions, slots, state):
    return torch.zeros(len(kv), 128), torch.ones(len(kv), dtype=torch.bool)
"""
CHECKS = [(operation.name, check.id) for operation in all_operations() for check in checks_of(operation)]


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("kernels") / "wrong.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture(autouse=True)
def one_child(monkeypatch):
    """All of these functions live in one child process, which is started once and ends with this one."""
    monkeypatch.setattr(Worker, "close", lambda self: None)


def finding(path, op: str, function: str, check: Check):
    layout = "bf16" if find(op).layouts else None
    impl = registry.load(f"{path}:{function}", layout, op, None, CPU)
    with opened(impl, CPU) as runner:
        return run_check(check, runner, profile("smoke", examples=6)).verdict


@pytest.mark.parametrize("function", ["raises", "wrong"])
@pytest.mark.parametrize(("op", "name"), CHECKS, ids=[f"{op}-{name}" for op, name in CHECKS])
def test_the_repro_line_shows_the_same_failure(source, capsys, op, name, function):
    check = next(each for each in checks_of(find(op)) if each.id == name)
    verdict = finding(source, op, op if function == "wrong" else function, check)
    if verdict.status in (Status.NOT_RUN, Status.UNSUPPORTED):
        pytest.skip(f"{verdict.status}: {verdict.message}")
    if function == "raises":
        assert verdict.status is Status.ERROR
    elif verdict.status is not Status.FAILED:
        pytest.skip(f"this function {verdict.status} {name}")
    words = shlex.split(verdict.repro)
    assert words[:2] == ["parity", "run"]
    code = main([*words[1:], "--check", name, "--device", "cpu"])
    shown = capsys.readouterr().out
    assert code == 1
    assert f"{verdict.status:<12}{name}" in shown
    assert verdict.message.split(";")[0] in shown
