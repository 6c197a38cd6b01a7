"""Accelerators as exchanges on the book of a generation: what each does to seconds and bytes, and a stack of them.

`formulas` and `parallel` are arithmetic on numbers; `account` is the open book, which `levers` change one by one;
`stack` applies a whole plan. Nothing here imports torch.
"""
