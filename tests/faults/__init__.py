"""Small training programs with a known fault, and healthy ones: what the findings are judged by."""
