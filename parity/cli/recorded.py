"""`parity recorded`."""

from __future__ import annotations

import argparse

from parity.cli import options as shared


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="DIR", help="a folder with index.json and its safetensors files")
    shared.add_json(parser)


def run(options: argparse.Namespace) -> int:
    from parity.recorded import main_replay

    return int(main_replay(options.folder, options.json))
