"""Planted faults are named first on random cases: a sample here, all models by the tool itself."""

import random

from parity.selftest.helpers import tool

confusion = tool("diagnosis_confusion")
SAMPLE = 6
EVERY_OPERATION = ("relu-after-sum", "topk-bits-unsigned", "store-scale-neighbour", "ape-chunk-local")


def test_a_sample_of_all_models_is_named_first_on_random_cases():
    ids = random.Random(7).sample(confusion.measurable(), SAMPLE)
    rows = [confusion.measure_one(id, seed=1) for id in [*EVERY_OPERATION, *ids]]
    assert confusion.share(rows) >= confusion.WANTED, rows
    assert sum(row["outcome"] != "hidden" for row in rows) >= 8
    assert "Named first, alone or among equals" in confusion.markdown(rows)
