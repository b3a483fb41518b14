"""Rewrite: rules that replace gradients, at the nodes of the graph and at parameters."""

from __future__ import annotations

from fxgrad.rewriting import rules

__all__ = ["rules"]
