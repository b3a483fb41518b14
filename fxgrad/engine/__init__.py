"""Engine: one observed step, from the forward call to the flow of its backward event.

``step`` runs it; ``recorders`` says who records; ``holding`` and ``face`` stand in for the model's ``forward``;
``forward_values`` measures values; ``training`` asks the optimizer; ``alarms`` watches limits; ``objective`` finds the
loss of a one-shot call; ``assembly`` makes the flow.
"""

__all__: list[str] = []
