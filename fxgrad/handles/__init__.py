"""Handles: what ``watch``, ``rewrite``, ``instrument`` and ``torch.compile`` return, and what stands behind each."""

__all__: list[str] = []
