"""Gates: is this step near enough to the computed ones? Named after the methods that use them."""
