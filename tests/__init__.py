"""The tests of lamplighter. CONTRIBUTING.md tells the kinds of test, what each needs, and where a new one goes.

This file makes `tests` a real package, so that no other distribution's top-level `tests` can shadow `tests.nodes`.
"""
