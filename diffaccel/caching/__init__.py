"""Step caches: gates, predictors and guards (pure), and the hook that joins them."""
