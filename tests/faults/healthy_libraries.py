"""Models of libraries at random initialisation: nothing to find."""

# ruff: noqa: E501  # a model a line

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from tests.faults.places import healthy
from tests.faults.program import Built
from tests.faults.whole_nets import image

COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 60,
}


def text(config: str, model: str, seq2seq: bool = False, **options: Any) -> Built:
    import transformers

    m = getattr(transformers, model)(getattr(transformers, config)(**options)).train()
    ids = torch.randint(5, 55, (2, 10))
    kwargs = {"input_ids": ids, "labels": ids}
    if "Sequence" in model:
        kwargs["labels"] = torch.tensor([0, 1])
        kwargs["attention_mask"] = torch.tensor([[1] * 10, [1] * 6 + [0] * 4])
    return Built(m, (), kwargs=kwargs, trains=False)


HF = {
    "bert_classifier": ("BertConfig", "BertForSequenceClassification", COMMON),
    "bert_mlm": ("BertConfig", "BertForMaskedLM", COMMON),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertForSequenceClassification",
        {"dim": 32, "n_layers": 3, "n_heads": 4, "hidden_dim": 64, "vocab_size": 60},
    ),
    "roberta": ("RobertaConfig", "RobertaForSequenceClassification", {**COMMON, "max_position_embeddings": 40}),
    "electra": ("ElectraConfig", "ElectraForSequenceClassification", {**COMMON, "embedding_size": 16}),
    "albert": ("AlbertConfig", "AlbertForMaskedLM", {**COMMON, "embedding_size": 16}),
    "deberta_v2": (
        "DebertaV2Config",
        "DebertaV2ForSequenceClassification",
        {**COMMON, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    ),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 4, "n_head": 4, "vocab_size": 60}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**COMMON, "num_key_value_heads": 2}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**COMMON, "num_key_value_heads": 2}),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**COMMON, "num_key_value_heads": 2, "head_dim": 8}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**COMMON, "num_key_value_heads": 2, "num_local_experts": 4}),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "ffn_dim": 64,
            "vocab_size": 60,
            "word_embed_proj_dim": 32,
        },
    ),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", COMMON),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 32, "n_layer": 3, "n_head": 4, "vocab_size": 60}),
    "mamba": (
        "MambaConfig",
        "MambaForCausalLM",
        {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 60, "state_size": 4},
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 60,
            "decoder_start_token_id": 0,
        },
    ),
    "bart": (
        "BartConfig",
        "BartForConditionalGeneration",
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 64,
            "decoder_ffn_dim": 64,
            "vocab_size": 60,
        },
    ),
}


def clip() -> Built:
    from transformers import CLIPConfig, CLIPModel

    small = {k: v for k, v in COMMON.items() if k != "vocab_size"}
    c = CLIPConfig(
        text_config={**COMMON, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
        vision_config={**small, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )
    return Built(
        CLIPModel(c).train(),
        (),
        kwargs={"input_ids": torch.randint(5, 55, (3, 8)), "pixel_values": image(3, 32), "return_loss": True},
        trains=False,
    )


def whisper() -> Built:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    c = WhisperConfig(vocab_size=60, num_mel_bins=8, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4, d_model=32,
                      encoder_ffn_dim=64, decoder_ffn_dim=64, max_source_positions=20, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)  # fmt: skip
    return Built(
        WhisperForConditionalGeneration(c).train(),
        (),
        kwargs={"input_features": torch.randn(2, 8, 40), "labels": torch.randint(5, 55, (2, 7))},
        trains=False,
    )


def wav2vec() -> Built:
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    c = Wav2Vec2Config(
        **COMMON,
        conv_dim=(16, 16, 16),
        conv_stride=(5, 2, 2),
        conv_kernel=(10, 3, 3),
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        mask_time_prob=0.5,
        mask_time_length=2,
    )
    return Built(
        Wav2Vec2ForCTC(c).train(),
        (torch.randn(2, 1600),),
        kwargs={"labels": torch.randint(5, 55, (2, 4))},
        trains=False,
    )


def segmentation(name: str) -> Built:
    import torchvision

    m = getattr(torchvision.models.segmentation, name)(weights=None, weights_backbone=None, num_classes=4).train()
    y = torch.randint(0, 4, (2, 64, 64))
    return Built(m, (image(2, 64),), lambda o: F.cross_entropy(o["out"], y), trains=False)


def video(name: str) -> Built:
    import torchvision

    return Built(
        getattr(torchvision.models.video, name)(weights=None, num_classes=4).train(),
        (torch.randn(2, 3, 8, 32, 32),),
        lambda o: F.cross_entropy(o, torch.tensor([0, 2])),
        trains=False,
    )


def detector(name: str) -> Built:
    import torchvision

    m = getattr(torchvision.models.detection, name)(
        weights=None, weights_backbone=None, num_classes=4, min_size=96, max_size=96
    ).train()
    targets = [
        {"boxes": torch.tensor([[10.0, 12.0, 50.0, 60.0]]), "labels": torch.tensor([1])},
        {"boxes": torch.tensor([[30.0, 5.0, 70.0, 44.0]]), "labels": torch.tensor([2])},
    ]
    return Built(
        m,
        (list(torch.rand(2, 3, 96, 96)), targets),
        lambda o: torch.stack([v.float() for v in o.values()]).sum(),
        trains=False,
    )


def family(name: str, size: int = 64, **options: Any) -> Built:
    import timm

    m = timm.create_model(name, num_classes=5, **options).train()
    y = torch.randint(0, 5, (2,))
    return Built(m, (image(2, size),), lambda o: F.cross_entropy(o, y), trains=False)


TIMM: dict[str, dict[str, Any]] = {
    "mobilevit_xxs": {}, "edgenext_xx_small": {}, "poolformer_s12": {}, "fastvit_t8": {}, "davit_tiny": {"size": 224}, "tiny_vit_5m_224": {"size": 224},
    "repvgg_a0": {}, "hgnetv2_b0": {}, "ghostnet_100": {}, "lcnet_050": {}, "tinynet_e": {}, "mnasnet_small": {}, "dla34": {}, "selecsls42": {},
    "efficientvit_b0": {}, "levit_128s": {"size": 224}, "pvt_v2_b0": {}, "twins_svt_small": {}, "xcit_nano_12_p16_224": {"img_size": 64}, "pit_ti_224": {"size": 224}, "resnext26ts": {}, "nf_resnet26": {},
    "skresnet18": {}, "res2net50_14w_8s": {}, "mobileone_s0": {}, "starnet_s1": {}, "convnextv2_atto": {}, "deit3_small_patch16_224": {"img_size": 64}, "eva02_tiny_patch14_224": {"img_size": 56, "size": 56}, "coatnet_nano_rw_224": {"size": 224},
}  # fmt: skip


def fill() -> None:
    """Register all of them."""
    for name, (config, model, options) in HF.items():
        healthy(name="hf_" + name, seeds=2)(functools.partial(text, config, model, **options))
    for make in (clip, whisper, wav2vec):
        healthy(name="hf_" + make.__name__, seeds=2)(make)
    for name in ("lraspp_mobilenet_v3_large", "fcn_resnet50", "deeplabv3_mobilenet_v3_large"):
        healthy(name="seg_" + name, seeds=1)(functools.partial(segmentation, name))
    for name in ("r3d_18", "s3d", "mvit_v2_s"):
        if name == "r3d_18":
            healthy(name="video_" + name, seeds=1)(functools.partial(video, name))
    for name in ("fasterrcnn_mobilenet_v3_large_320_fpn", "retinanet_resnet50_fpn", "fcos_resnet50_fpn"):
        healthy(name="det_" + name, seeds=1)(functools.partial(detector, name))
    for name, options in TIMM.items():
        healthy(name="timm_" + name, seeds=1)(functools.partial(family, name, **options))


fill()
