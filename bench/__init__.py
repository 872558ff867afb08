"""Benchmarks: ``python -m bench NAME [--quick] [--json FILE]``.

A benchmark is a module or package of this one with a docstring, ``TARGETS: dict[str, Target]`` and
``run(quick: bool) -> dict[str, float]``, which returns its metrics; its name is the module's.
"""
