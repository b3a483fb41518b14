"""Training, watched and plain, ends in the same bits: programs of the kinds that people write."""
