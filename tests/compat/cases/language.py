"""Models of transformers as they are: inputs by name, outputs with `.logits`, the loss that the model computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from tests.compat.case import Cases
from tests.compat.samples import images, labelled, labels, language, masked_tokens, next_tokens, pictures, tokens

CASES = Cases("language", "transformers")
add = CASES.add
IDS, MASKED, NEXT = tokens(), masked_tokens(), next_tokens()
SIZE: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
}  # fmt: skip
BERT = {**SIZE, "max_position_embeddings": 16, "num_labels": 3}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GPT2 = {
    "vocab_size": 40, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "num_labels": 3, "pad_token_id": 0,
}  # fmt: skip
GPT2_QUIET = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA = {**SIZE, "num_key_value_heads": 1, "max_position_embeddings": 16, "pad_token_id": 0}
T5 = {
    "vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2,
    "decoder_start_token_id": 0,
}  # fmt: skip
LIKE_BERT = {
    "Roberta": {"pad_token_id": 0},
    "Electra": {"embedding_size": 16},
    "Albert": {"embedding_size": 8, "classifier_dropout_prob": 0.0},
}


def of_transformers(model: str, config: str, prepare: Callable[[Any], Any] | None = None, **options: Any) -> Any:
    """A builder of a model with random weights."""

    def build() -> nn.Module:
        import transformers

        made = getattr(transformers, model)(getattr(transformers, config)(**options))
        if prepare:
            prepare(made)
        return made

    return build


def bert(**options: Any) -> Any:
    return of_transformers("BertForSequenceClassification", "BertConfig", **{**BERT, **options})


def gpt2(kind: str = "LMHeadModel", **options: Any) -> Any:
    return of_transformers(f"GPT2{kind}", "GPT2Config", **{**GPT2, **options})


def llama(prepare: Any = None, **options: Any) -> Any:
    return of_transformers("LlamaForCausalLM", "LlamaConfig", prepare, **{**LLAMA, **options})


def token_loss(output: Tensor, y: Tensor) -> Tensor:
    """Cross-entropy averaged over a sample's tokens."""
    return F.cross_entropy(output.flatten(0, 1), y.flatten(), reduction="none").reshape(y.shape).mean(1)


# Classifiers with an attention mask, at their defaults and without dropout.
add("BertForSequenceClassification", bert(), MASKED, draws=True)
add("BertForSequenceClassification, no dropout", bert(**QUIET), MASKED)
add("BertForSequenceClassification, no dropout, ids alone", bert(**QUIET), IDS)
add("BertForSequenceClassification, eager attention", bert(attn_implementation="eager"), MASKED, draws=True)
add(
    "BertForSequenceClassification, eager, no dropout", bert(attn_implementation="eager", **QUIET), MASKED
)  # fmt: skip
add('BertForSequenceClassification, loss="model"', bert(**QUIET), labelled("input_ids", MASKED), loss="model")
METHODS = {
    "Scaffold": "Scaffold()", "FedDyn + FedNLR": "FedDyn(0.1) + FedNLR()", "FedCurv": "FedCurv(weight=0.1)",
    "CCVR": "CCVR()",
}  # fmt: skip
for name, method in METHODS.items():
    add(f"BertForSequenceClassification, {name}", bert(**QUIET), IDS, method=method)
DISTILBERT = {"vocab_size": 40, "dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32, "num_labels": 3}
add("DistilBertForSequenceClassification", of_transformers(
    "DistilBertForSequenceClassification", "DistilBertConfig", **DISTILBERT
), MASKED, draws=True)  # fmt: skip
for name, more in LIKE_BERT.items():
    add(f"{name}ForSequenceClassification, no dropout", of_transformers(
        f"{name}ForSequenceClassification", f"{name}Config", **{**BERT, **QUIET, **more}
    ), MASKED)  # fmt: skip
add("RemBertForSequenceClassification, no dropout, the classifier's included", of_transformers(
    "RemBertForSequenceClassification", "RemBertConfig", **BERT, **QUIET, classifier_dropout_prob=0.0,
    input_embedding_size=16, output_embedding_size=16, pad_token_id=0, bos_token_id=1, eos_token_id=2
), MASKED)  # fmt: skip
CANINE = {
    **{key: value for key, value in SIZE.items() if key != "vocab_size"}, "max_position_embeddings": 32,
    "num_labels": 3, "num_hash_buckets": 16, "num_hash_functions": 2, "downsampling_rate": 2,
    "local_transformer_stride": 4, "upsampling_kernel_size": 2, "pad_token_id": 0,
}  # fmt: skip
add("CanineForSequenceClassification, no dropout", of_transformers(
    "CanineForSequenceClassification", "CanineConfig", **CANINE, **QUIET
), masked_tokens(length=16), dtype=torch.float32, note="In float64 its outputs are NaN.")  # fmt: skip
add("DebertaV2ForSequenceClassification, no dropout", of_transformers(
    "DebertaV2ForSequenceClassification", "DebertaV2Config", **BERT, **QUIET, relative_attention=True,
    pos_att_type=["p2c", "c2p"], pooler_dropout=0.0, position_buckets=4
), MASKED)  # fmt: skip
add("ModernBertForSequenceClassification", of_transformers(
    "ModernBertForSequenceClassification", "ModernBertConfig", **SIZE, num_labels=3, pad_token_id=0, bos_token_id=1,
    eos_token_id=2, cls_token_id=1, sep_token_id=2, attn_implementation="sdpa", reference_compile=False
), MASKED)  # fmt: skip

# Labels per token, and the loss that the model computes from them.
add('BertForTokenClassification, loss="model", -100 left out', of_transformers(
    "BertForTokenClassification", "BertConfig", **{**BERT, **QUIET, "num_labels": 40}
), language(ignored=True), loss="model")  # fmt: skip
add('BertForMaskedLM, loss="model", -100 left out', of_transformers(
    "BertForMaskedLM", "BertConfig", **BERT, **QUIET
), language(ignored=True), loss="model")  # fmt: skip

# Causal language models.
FLOAT32 = {"dtype": torch.float32}
"""For models that torch has no float64 kernels for."""
add("GPT2ForSequenceClassification", gpt2("ForSequenceClassification"), IDS, draws=True)
add("GPT2ForSequenceClassification, no dropout", gpt2("ForSequenceClassification", **GPT2_QUIET), IDS)
add("GPT2LMHeadModel, tied weights", gpt2(**GPT2_QUIET), NEXT, loss=token_loss)
add('GPT2LMHeadModel, loss="model"', gpt2(**GPT2_QUIET), language(), loss="model")
CAUSAL = {
    "GPT2LMHeadModel": gpt2(**GPT2_QUIET, use_cache=False),
    "LlamaForCausalLM": llama(use_cache=False),
    "Qwen3ForCausalLM": of_transformers("Qwen3ForCausalLM", "Qwen3Config", **LLAMA, head_dim=8, use_cache=False),
    "MixtralForCausalLM": of_transformers(
        "MixtralForCausalLM", "MixtralConfig", **LLAMA, num_local_experts=2, use_cache=False
    ),
}  # fmt: skip
for name, build in CAUSAL.items():
    add(f"{name}, use_cache=False", build, NEXT, loss=token_loss, **FLOAT32 if name.startswith("Mixtral") else {})
add("LlamaForCausalLM", llama(), NEXT, loss=token_loss)
add("Qwen3ForCausalLM", of_transformers("Qwen3ForCausalLM", "Qwen3Config", **LLAMA, head_dim=8), NEXT, loss=token_loss)
add("MixtralForCausalLM", of_transformers(
    "MixtralForCausalLM", "MixtralConfig", **LLAMA, num_local_experts=2
), NEXT, loss=token_loss, **FLOAT32)  # fmt: skip
add("GemmaForCausalLM", of_transformers(
    "GemmaForCausalLM", "GemmaConfig", **LLAMA, head_dim=8
), NEXT, loss=token_loss)  # fmt: skip
add("LlamaForCausalLM, FedCurv", llama(), NEXT, loss=token_loss, method="FedCurv(weight=0.1)")
add("LlamaForCausalLM, gradient_checkpointing_enable()", llama(
    lambda model: model.gradient_checkpointing_enable(), use_cache=False
), NEXT, loss=token_loss, review=("S1",), local={"lr": 0.5})  # fmt: skip


def masked_next(length: int = 10, four: bool = False) -> Any:
    """Ids with an attention mask: one number per token, or one per pair of tokens, to be added to the scores."""

    def make(g: Generator, n: int) -> tuple[dict[str, Tensor], Tensor]:
        x, _ = masked_tokens(length)(g, n)
        y = torch.randint(40, (n, length), generator=g)
        if four:
            seen = x["attention_mask"][:, None, None, :].bool() & torch.ones(length, length).tril().bool()
            x["attention_mask"] = (~seen).double() * -1e9
        return x, y

    return make


add("LlamaForCausalLM, attention mask", llama(), masked_next(), loss=token_loss)
add(
    "LlamaForCausalLM, attention mask, eager", llama(attn_implementation="eager"), masked_next(), loss=token_loss
)  # fmt: skip
add("LlamaForCausalLM, a mask of four dimensions", llama(), masked_next(four=True), loss=token_loss)
MAMBA = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "use_cache": False}
add("MambaForCausalLM", of_transformers("MambaForCausalLM", "MambaConfig", **MAMBA), NEXT, loss=token_loss)

# From sequence to sequence, and speech.
add('T5ForConditionalGeneration, loss="model"', of_transformers(
    "T5ForConditionalGeneration", "T5Config", **T5
), language(), loss="model", draws=True)  # fmt: skip
add('T5ForConditionalGeneration, no dropout, loss="model"', of_transformers(
    "T5ForConditionalGeneration", "T5Config", **T5, dropout_rate=0.0
), language(), loss="model")  # fmt: skip
BART = {
    "vocab_size": 40, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "max_position_embeddings": 16,
    "dropout": 0.0, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
add('BartForConditionalGeneration, no dropout, loss="model"', of_transformers(
    "BartForConditionalGeneration", "BartConfig", **BART
), language(), loss="model")  # fmt: skip
SPEECH = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "conv_dim": (8, 8),
    "conv_kernel": (8, 4), "conv_stride": (4, 2), "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2, "num_labels": 3, "classifier_proj_size": 8, "mask_time_length": 2,
}  # fmt: skip
NO_DRAWS = {
    "hidden_dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "feat_proj_dropout": 0.0,
    "final_dropout": 0.0, "layerdrop": 0.0, "apply_spec_augment": False,
}  # fmt: skip


def waves(g: Generator, n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 200, generator=g), labels(g, n, 3)


add("Wav2Vec2ForSequenceClassification", of_transformers(
    "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **SPEECH
), waves, draws=True)  # fmt: skip
add("Wav2Vec2ForSequenceClassification, no dropout", of_transformers(
    "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **SPEECH, **NO_DRAWS
), waves)  # fmt: skip
WHISPER = {
    "vocab_size": 40, "num_mel_bins": 8, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 16,
    "max_source_positions": 12, "max_target_positions": 12, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1, "suppress_tokens": None, "begin_suppress_tokens": None,
}  # fmt: skip


def spectrograms(g: Generator, n: int) -> tuple[dict[str, Tensor], Tensor]:
    ids, y = next_tokens()(g, n)
    return {"input_features": torch.randn(n, 8, 24, generator=g), "decoder_input_ids": ids}, y


for name, more in {"": {}, ", layerdrop": {"encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}}.items():
    add(f"WhisperForConditionalGeneration{name}", of_transformers(
        "WhisperForConditionalGeneration", "WhisperConfig", **WHISPER, **more
    ), spectrograms, loss=token_loss, draws=bool(name))  # fmt: skip

# Images.
VISION = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32, "num_labels": 4}
add("ViTForImageClassification", of_transformers(
    "ViTForImageClassification", "ViTConfig", **VISION, image_size=16, patch_size=4
), images())  # fmt: skip
add("ResNetForImageClassification", of_transformers(
    "ResNetForImageClassification", "ResNetConfig", embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=4,
    layer_type="basic"
), images(size=32))  # fmt: skip
SEGFORMER = {
    "num_encoder_blocks": 2, "depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [8, 16], "patch_sizes": [3, 3],
    "strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 16, "num_labels": 3,
}  # fmt: skip
add('SegformerForSemanticSegmentation, loss="model"', of_transformers(
    "SegformerForSemanticSegmentation", "SegformerConfig", **SEGFORMER, drop_path_rate=0.0, classifier_dropout_prob=0.0
), labelled("pixel_values", pictures(3, 16)), loss="model")  # fmt: skip

add("BeitForImageClassification, no stochastic depth", of_transformers(
    "BeitForImageClassification", "BeitConfig", **VISION, **QUIET, image_size=16, patch_size=4, drop_path_rate=0.0
), images())  # fmt: skip


def captioned(g: Generator, n: int) -> tuple[dict[str, Tensor], Tensor]:
    pixels, _ = images()(g, n)
    ids = torch.randint(3, 40, (n, 8), generator=g)
    ids[:, -1] = 2  # where CLIP reads a text's embedding
    return {"input_ids": ids, "pixel_values": pixels}, torch.zeros(n, dtype=torch.int64)


def among_the_batch(output: Tensor, y: Tensor) -> Tensor:
    """Which text of the batch belongs to an image."""
    return F.cross_entropy(output, torch.arange(len(output)), reduction="none")


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {**SIZE, "max_position_embeddings": 8, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    vision = {**{k: v for k, v in VISION.items() if k != "num_labels"}, "image_size": 16, "patch_size": 4}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


add(
    "CLIPModel, contrastive", clip, captioned, loss=among_the_batch, output="logits_per_image", review=("S3",)
)  # fmt: skip
