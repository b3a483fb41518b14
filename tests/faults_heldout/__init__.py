"""Programs of an examiner who did not see the rules: faults, traps and healthy controls."""


def load() -> None:
    """Register all programs."""
    from tests.faults_heldout import controls, hard, seeded, traps, zoo  # noqa: F401
