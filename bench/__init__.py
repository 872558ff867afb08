"""Benchmarks: ``python -m bench NAME [--quick] [--json FILE]``.

A benchmark is a module of this package with a docstring, ``TARGETS: dict[str, Target]`` and
``run(quick: bool) -> dict[str, float]``, which returns its metrics; its file's name is its name.
"""
