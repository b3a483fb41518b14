"""Programs about which fxgrad and the examiner do not agree yet, and why."""

from __future__ import annotations

#: By name: what is open.  A program leaves the list when it is judged right under all its seeds.
OPEN: dict[str, str] = {
    "where_never_taken": "a condition that never holds is only information in one step; arguable",
    "copied_into_data_of_buffer": "a copy into .data is a cut; the finding says that the result is dropped",
    # The second examiner's misses.
    "relu_by_where_never_on": "as where_never_taken: a ReLU by hand that never fires is only information",
    "relu_of_what_is_always_negative": "fewer than 16 units and no cause in a bias: nothing is said of an exact zero",
    "relu_of_minus_softplus": "the same with 4 units",
    "relu_six_module_all_above": "the same, above the upper limit; the cause in the bias is not sought upwards",
    "hard_sigmoid_outside": "the same",
    "clamped_in_place_from_thirty": "the same, a clamp with a lower limit of 30",
    "dead_without_a_cause_over_steps": "the same over 8 steps: 8 units have fewer than 1,000 samples",
    "subtracted_from_itself": "edges cancel where a value's gradients are summed: no node blocks, the sum is zero",
    "difference_of_the_same_thing_twice": "the same",
    "centred_over_a_batch_of_one": "the same",
    "slice_that_is_empty": "an empty slice takes an empty gradient, which counts as no zeros",
    # And its false alarms.
    "gate_times_zero_at_first": "a learnable factor of zero in addcmul is not taken for zero by design",
    "lerp_towards_block_by_zero_parameter": "the same in lerp",
    "minimal_gated_unit_eighty_steps": "a recurrence whose carry goes past its weights is not taken for a recurrence",
    "gru_by_hand_forty_steps": "the same",
    "conv_gru_over_frames": "the same",
    "exponential_average_of_features": "the same",
    "output_brought_back_to_thousands": "a constant of 1,000 that brings the output back to its unit",
    "output_in_physical_units_of_two_thousand": "the same",
    "coordinates_in_metres_and_loss_in_kilometres": "the same",
}
