"""Decides on Triton's interpreter before any test module can import triton."""

from parity.run import interpreter

interpreter.prepare("auto")
