"""Models of the large collections, with small inputs: every torchvision model, timm families, Hugging Face models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.runs import tensors_in

Built = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[[Any], Tensor]]

#: timm model by family: one of each, small ones.
TIMM = (
    "beit_base_patch16_224", "cait_xxs24_224", "coat_tiny", "convit_tiny", "convnext_atto", "crossvit_tiny_240",
    "cspresnet50", "davit_tiny", "deit_tiny_patch16_224", "densenet121", "dla34", "dm_nfnet_f0", "edgenext_xx_small",
    "efficientnet_b0", "efficientvit_b0", "fastvit_t8", "ghostnet_050", "hrnet_w18_small", "inception_next_tiny",
    "levit_128s", "mixer_s32_224", "mobilenetv3_small_050", "mobilevit_xxs", "poolformer_s12", "pvt_v2_b0",
    "regnetx_002", "repvgg_a0", "res2net50_14w_8s", "resnet10t", "rexnet_100", "swin_tiny_patch4_window7_224",
    "tresnet_m", "twins_svt_small", "vit_tiny_patch16_224", "xcit_nano_12_p16_224",
)  # fmt: skip


def squares(output: Any) -> Tensor:
    """Mean square over every floating output that requires a gradient, or the output's own loss."""
    own = output.get("loss") if hasattr(output, "get") else None
    if isinstance(own, Tensor):
        return own
    found = [t for _, t in tensors_in(output) if t.is_floating_point() and t.requires_grad]
    return torch.stack([t.float().square().mean() for t in found]).sum()


def torchvision_names() -> list[str]:
    """All names of ``torchvision.models.list_models``."""
    import torchvision

    return sorted(torchvision.models.list_models())


def torchvision_case(name: str) -> Built:
    """A torchvision model in train mode, random weights, on small inputs."""
    import torchvision

    torch.manual_seed(0)
    builder = torchvision.models.get_model_builder(name)
    kind = builder.__module__
    options: dict[str, Any] = {"weights": None}
    if ".detection" in kind:
        return _detection(name, options)
    if ".segmentation" in kind:
        options["weights_backbone"] = None
    if ".quantization" in kind:
        options["quantize"] = False
    if name.startswith("vit_"):
        options["image_size"] = 64 if not name.endswith("14") else 56
    model = torchvision.models.get_model(name, **options).train()
    if ".optical_flow" in kind:
        return model, (torch.randn(1, 3, 128, 128), torch.randn(1, 3, 128, 128)), {"num_flow_updates": 2}, squares
    return model, (torch.randn(*_shape(name, kind)),), {}, squares


def _shape(name: str, kind: str) -> tuple[int, ...]:
    if ".video" in kind:
        if name.startswith("mvit"):
            return (1, 3, 16, 224, 224)
        return (1, 3, 16, 224, 224) if name == "s3d" else (2, 3, 4, 32, 32)
    if "inception" in name:
        return (2, 3, 299, 299)
    if name == "vit_h_14":
        return (2, 3, 56, 56)
    return (2, 3, 224, 224) if name.startswith(("maxvit", "alexnet")) else (2, 3, 64, 64)


def _detection(name: str, options: dict[str, Any]) -> Built:
    import torchvision

    sizes = {} if name.startswith("ssd") else {"min_size": 64, "max_size": 96}
    model = torchvision.models.get_model(name, **options, weights_backbone=None, num_classes=3, **sizes).train()
    images = [torch.rand(3, 64, 64), torch.rand(3, 72, 64)]
    target: dict[str, Tensor] = {
        "boxes": torch.tensor([[5.0, 5.0, 40.0, 50.0]]), "labels": torch.tensor([1]),
        "masks": (torch.rand(1, 64, 64) > 0.5).to(torch.uint8), "keypoints": torch.rand(1, 17, 3) * 20 + 10,
    }  # fmt: skip
    target["keypoints"][..., 2] = 1.0
    second = dict(target, masks=(torch.rand(1, 72, 64) > 0.5).to(torch.uint8))
    return model, (images, [target, second]), {}, lambda losses: torch.stack(list(losses.values())).sum()


def timm_case(name: str) -> Built:
    """A timm model in train mode, random weights, at its own image size."""
    import timm

    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=10).train()
    return model, (torch.randn(2, *model.default_cfg["input_size"]),), {}, squares


def transformers_cases() -> dict[str, Callable[[], Built]]:
    """Hugging Face models from tiny configurations, by architecture."""
    import transformers as hf

    ids = torch.arange(24).reshape(2, 12) % 50 + 5
    small = {
        "vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    image = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
             "image_size": 32, "patch_size": 8}  # fmt: skip
    text = {"input_ids": ids, "labels": ids}
    pixels = {"pixel_values": torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)}
    ends = {"bos_token_id": 1, "eos_token_id": 2}
    grouped = {**small, "num_key_value_heads": 1}
    t5 = {"vocab_size": 100, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2,
          "decoder_start_token_id": 0}  # fmt: skip
    rows: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
        "gpt2": ("GPT2LMHeadModel", "GPT2Config",
                 {"vocab_size": 100, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32, **ends}, text),
        "bert": ("BertForMaskedLM", "BertConfig", small, text),
        "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**small, "max_position_embeddings": 64}, text),
        "distilbert": ("DistilBertForMaskedLM", "DistilBertConfig",
                       {"vocab_size": 100, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}, text),
        "llama": ("LlamaForCausalLM", "LlamaConfig", small, text),
        "mistral": ("MistralForCausalLM", "MistralConfig", grouped, text),
        "mixtral": ("MixtralForCausalLM", "MixtralConfig", {**grouped, "num_local_experts": 4}, text),
        "opt": ("OPTForCausalLM", "OPTConfig",
                {**small, "ffn_dim": 64, "word_embed_proj_dim": 32}, text),
        "t5": ("T5ForConditionalGeneration", "T5Config", t5, text),
        "mamba": ("MambaForCausalLM", "MambaConfig",
                  {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}, text),
        "vit": ("ViTForImageClassification", "ViTConfig", image, pixels),
        "clip": ("CLIPModel", "CLIPConfig",
                 {"text_config": {**small, "max_position_embeddings": 32}, "vision_config": image,
                  "projection_dim": 16}, {"input_ids": ids, **pixels, "return_loss": True}),
    }  # fmt: skip

    def build(model: str, config: str, options: dict[str, Any], inputs: dict[str, Any]) -> Built:
        torch.manual_seed(0)
        return getattr(hf, model)(getattr(hf, config)(**options)).train(), (), inputs, squares

    return {name: lambda row=row: build(*row) for name, row in rows.items()}  # type: ignore[misc]
