"""Instrument: put identity probes with tensor hooks on every value that can carry a gradient."""
