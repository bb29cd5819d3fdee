"""The peers' rules: each accepts and refuses what its owners say it does, and what they cannot see."""

import math

import torch

from parity.faults.building import staged
from parity.faults.catalogue import BY_ID
from parity.selftest.helpers import tool

rules = tool("acceptance_rules")
RULES = rules.RULES
BY_NAME = {rule.name: rule for rule in RULES}


def seen(out, wanted, lens=None, chosen=((0,),), right=((0,),)):
    out, wanted = torch.as_tensor(out, dtype=torch.float32), torch.as_tensor(wanted, dtype=torch.float64)
    lens = torch.full((out.shape[0],), out.shape[1]) if lens is None else torch.tensor(lens)
    return rules.Seen(out, wanted, wanted, lens, torch.tensor(chosen), torch.tensor(right))


def test_a_global_cosine_loses_power_with_size():
    for cells, accepted in ((200, False), (20_000, True)):
        wanted = torch.ones(1, cells, dtype=torch.float64)
        out = wanted.clone()
        out[0, 0] = -1.0
        assert BY_NAME["cosine 1e-3"].accepts(seen(out, wanted)) is accepted


def test_the_pair_of_thresholds_sees_what_the_single_one_does_not():
    wanted = torch.linspace(1, 2, 100, dtype=torch.float64)[None]
    out = wanted * (1 + 0.01 * torch.where(torch.arange(100) % 2 == 0, 1.0, -1.0))
    assert BY_NAME["cosine 1e-3"].accepts(seen(out, wanted))
    assert not BY_NAME["cosine 1e-3 and 5e-6"].accepts(seen(out, wanted))


def test_masks_must_agree():
    wanted = torch.zeros(1, 4, dtype=torch.float64)
    assert not BY_NAME["cosine 1e-3"].accepts(seen([[1.0, 1.0, 0.0, 0.0]], wanted, lens=[2]))
    good = seen([[1.0, 1.0, -math.inf, -math.inf]], [[1.0, 1.0, 0.0, 0.0]], lens=[2])
    assert BY_NAME["cosine 1e-3"].accepts(good)


def test_allclose_at_both_tolerances():
    assert BY_NAME["allclose 1.0 / 0.2"].accepts(seen([[2.1]], [[1.0]]))
    assert not BY_NAME["allclose 1.0 / 0.2"].accepts(seen([[2.3]], [[1.0]]))
    assert not BY_NAME["allclose 5e-5 / 1e-5"].accepts(seen([[1.001]], [[1.0]]))


def test_row_maximum_is_asked_of_every_row():
    good, bad = seen([[1.0, 0.005]], [[1.0, 0.0]]), seen([[1.0, 0.02]], [[1.0, 0.0]])
    assert BY_NAME["row maximum 1e-2"].accepts(good) and not BY_NAME["row maximum 1e-2"].accepts(bad)


def test_index_sets():
    twenty = [list(range(20))]
    one_off = [[*range(19), 77]]
    found = seen([[0.0]], [[0.0]], chosen=one_off, right=twenty)
    assert BY_NAME["overlap of index sets 0.95"].accepts(found)
    assert not BY_NAME["mean Jaccard 0.95"].accepts(found)
    assert rules.shares(seen([[0.0]], [[0.0]], chosen=[[-1]], right=[[-1]]))[0].tolist() == [1.0]


def test_nan_is_refused_by_every_rule_of_values():
    for rule in RULES:
        if rule.ops == ("paged_logits",):
            assert not rule.accepts(seen([[math.nan]], [[1.0]])), rule.name


def test_owners_operands_are_accepted_from_a_correct_function_and_a_fault_is_refused():
    for layout in ("bf16", "fp8"):
        operands, key = rules.owners_operands(layout, 2, 2, 70, seed=1), ("test", layout)
        good, bad = (
            rules.look(staged("paged_logits", layout, None, change), operands, key, layout)
            for change in (None, BY_ID["relu-missing"].change)
        )
        assert BY_NAME["cosine 1e-3"].accepts(good) and not BY_NAME["cosine 1e-3"].accepts(bad)


def test_the_table_has_a_line_for_every_rule():
    row = {group: ["cosine 1e-3"] for group in rules.GROUPS}
    models, correct = {"relu-missing": row}, {"paged_logits bf16: staged": row}
    rates = [rules.rate(rule.name, rule.owner, rule.ops, models, correct) for rule in RULES]
    report = {"models": models, "correct": correct, "rules": rates}
    text = rules.table(report)
    assert all(rule.name in text for rule in RULES) and "100% (1 of 1)" in text
