"""Programs of an examiner who did not see the rules: faults, traps and healthy controls."""


def load() -> None:
    """Register all programs."""
    from tests.faults_heldout import (  # noqa: F401
        controls1,
        controls2,
        controls3,
        controls4,
        controls5,
        controls6,
        exam2_faults1,
        exam2_faults2,
        exam2_faults3,
        exam2_healthy1,
        exam2_healthy2,
        exam2_healthy3,
        exam2_healthy4,
        exam2_healthy5,
        exam2_more,
        exam2_series,
        exam2_traps,
        exam2_traps2,
        hard1,
        hard2,
        hard3,
        seeded1,
        seeded2,
        seeded3,
        traps1,
        traps2,
        zoo,
    )
