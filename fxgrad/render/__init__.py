"""Render: a flow as terminal text, DOT and SVG.  Never changes the flow, never imports torch."""
