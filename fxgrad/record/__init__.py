"""Record: gradients to statistics on the device, and from there to a ``GradientFlow``."""
