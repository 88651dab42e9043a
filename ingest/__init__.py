"""The Ray-free core: what a dataset is, what is delivered in which order, and how bytes become pictures."""

__version__ = "0.1.0"
