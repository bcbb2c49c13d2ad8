"""Sources of iteration times; each ends in the engine's integer CostTable."""

from jaxsim.cost.roofline import Roofline

__all__ = ["Roofline"]
