"""`parity list`: what there is to choose from."""

from __future__ import annotations

import argparse
from typing import Any

from parity.cli import options as shared
from parity.command import write_json
from parity.vocabulary import LEVELS, PASSED


def add(parser: argparse.ArgumentParser) -> None:
    shared.add_device(parser)
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    from parity.domain.profiles import PROFILES
    from parity.ops.check import checks_of
    from parity.pages import layout
    from parity.run import device as devices
    from parity.run import operation, registry

    device = shared.device_of(options)
    operations = operation.all_operations()
    implementations = [
        {
            "name": impl.name,
            "op": impl.op,
            "layout": impl.layout or None,
            "arithmetic": impl.arithmetic,
            "absent": impl.absent,
        }
        for impl in registry.builtin(device).values()
    ]
    names = dict.fromkeys((check.level, check.name) for each in operations for check in checks_of(each))
    checks = [
        {"level": level, "name": name, "ops": [each.name for each in operations if has(each, level, name)]}
        for level, name in sorted(names, key=lambda name: LEVELS.index(name[0]))
    ]
    value: dict[str, Any] = {
        "device": str(device),
        "operations": {each.name: each.about for each in operations},
        "layouts": {name: layout.find(name).about for name in layout.names()},
        "implementations": implementations,
        "checks": checks,
        "profiles": {name: drawing(profile) for name, profile in PROFILES.items()},
        "data": {each.name: list(each.data) for each in operations},
        "provenance": devices.provenance(device),
    }
    print("\n".join(lines(value, devices.architecture(device))))
    write_json(options.json, value)
    return PASSED


def has(operation: Any, level: str, name: str) -> bool:
    """Whether an operation has the check."""
    return any((check.level, check.name) == (level, name) for check in operation.checks())


def drawing(profile: Any) -> str:
    """How much a profile draws, in words."""
    how = "the same cases at every run" if profile.derandomised else "new cases at every run"
    return f"{profile.examples} examples per level and implementation, {how}"


def lines(value: dict[str, Any], architecture: str) -> list[str]:
    """The lists for a terminal."""
    found = [f"device: {value['device']} ({architecture})", "", "operations (--op)"]
    found += [f"  {name:<14}{about}" for name, about in value["operations"].items()]
    found += ["", "layouts (--layout)", *(f"  {name:<14}{about}" for name, about in value["layouts"].items())]
    found += ["", "implementations (--impl)"]
    width = max(len(item["name"]) for item in value["implementations"]) + 2
    for item in value["implementations"]:
        what = f"{item['op']} {item['layout'] or ''}"
        state = f"not run: {item['absent']}" if item["absent"] else item["arithmetic"] or ""
        found.append(f"  {item['name']:<{width}}{what:<20}{state}".rstrip())
    found.append("  module:function or path/to/file.py:function, a function of your own (docs/concepts.md)")
    found += ["", "checks by level"]
    for level in LEVELS:
        named = [f"{item['name']} ({', '.join(item['ops'])})" for item in value["checks"] if item["level"] == level]
        found.append(f"  {level:<14}" + f"\n{'':<16}".join(named))
    found += ["", "profiles (--profile)", *(f"  {name:<14}{text}" for name, text in value["profiles"].items())]
    found += ["", "data classes (data= in a case string)"]
    return found + [f"  {name:<14}{', '.join(classes)}" for name, classes in value["data"].items()]
