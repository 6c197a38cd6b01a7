"""Pure mathematics of steps, torch alone: what caches, guidance and solvers share."""
