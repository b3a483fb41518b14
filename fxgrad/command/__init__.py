"""What the words of a command line mean: models, their arguments, losses and output files."""
