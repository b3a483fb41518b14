"""Programs about which fxgrad and the examiner do not agree yet, and why."""

from __future__ import annotations

#: By name: what is open.  A program leaves the list when it is judged right under all its seeds.
OPEN: dict[str, str] = {
    # origin of non-finite values
    "crf_impossible": "an Inf that came from a mask through logsumexp counts as masked until a NaN shows",
    "policy_no_action": "-inf written by log(mask) is blamed, not the softmax over a row of nothing else",
    "inf_pixel": "an Inf in the model's input is taken for a mask: the first NaN is blamed",
    "custom_backward": "a custom autograd function whose forward calls torch is no consumer of its input",
    # missed
    "reversal_with_rate_zero": "the same: the function is not on the graph",
    "reversal_with_rate_1e_minus_8": "the same: the function is not on the graph",
    "hinge_inside_all_satisfied": "a relu that shuts off every parameter, no cause in bias or weight: no finding",
    "mask_inverted": "a product that shuts off every parameter is only information",
    "relu_as_product_dead": "the same, as x * (x > 0)",
    "where_never_taken": "a condition that never holds is only information in one step; arguable",
    "sigmoid_image_with_mse": "a sigmoid at the end that shuts off every parameter is only information",
    # wrong words
    "through_item": "item() is a cut; the finding says that the result is dropped",
    "copied_into_data_of_buffer": "a copy into .data is a cut; the finding says that the result is dropped",
    # false alarms
    "detection_head_focal_masks": "prior bias of focal loss; product with a mask that is nearly all zero",
    "det_retinanet_resnet50_fpn": "the same in torchvision",
    "det_fcos_resnet50_fpn": "the same in torchvision",
    "sigmoid_gate_closed_by_design": "gate with a bias of -4",
    "vit_layer_scale": "LayerScale: the class token takes nearly all of the gradient",
    "timm_deit3_small_patch16_224": "the same in timm",
    "deq_loop": "input enters at every step of the loop, and its weight gets a gradient at every step",
    "lstm_hundred_steps": "an LSTMCell over 60 steps, loss at the end; a warning may be right, an error is not",
    "timm_selecsls42": "batch of two: batch normalisation over few entries gains decades",
    "timm_mobileone_s0": "the same; depends on the machine's arithmetic",
    "nan_sentinel_in_idle_buffer": "NaN in a buffer that no node takes is an error",
    "mask_as_frozen_parameter": "-inf in a frozen parameter (a mask) is an error",
    "inf_in_a_row_never_looked_up": "Inf in a row that the step never took is an error; arguable",
    "one_token_sequences": "attention over a single token is an error; arguable in one step",
    "reward_only_now_and_then": "loss_seed looks at the last step of a series only",
}
