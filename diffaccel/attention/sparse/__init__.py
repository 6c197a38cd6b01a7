"""Masks of sparse video attention, one method a file: pure functions from a geometry (and q, k) to a `BlockPlan`.

Beside each mask stands its config, which answers a `method.Query`; `registry` has them by name. `config` and
`handler` put one on a pipeline; all the others import with torch alone, so that other programs can use the masks.
"""
