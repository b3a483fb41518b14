"""Capture: obtain a graph from a model.  Front ends: ``symbolic`` and ``eager``."""
