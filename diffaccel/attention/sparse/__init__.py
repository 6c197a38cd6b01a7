"""Masks of sparse video attention, one method a file: pure functions from a geometry (and q, k) to a `BlockPlan`.

`plan_of(...)` of each file gives the plan; functions named `token_mask` are the same mask written out over tokens,
for references and tests at small sizes.
"""
