"""Small models, a file per kind; ``tests/models.py`` gathers them."""
