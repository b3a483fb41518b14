"""What we need from torch and no other room should ask for itself.

``private`` holds every private name of torch; ``structure`` finds tensors in nested values; ``preserve`` gives back
what a run of ours changed; ``fake`` makes tensors without memory; ``leaf_hooks`` puts one hook on a leaf tensor.
"""

__all__: list[str] = []
