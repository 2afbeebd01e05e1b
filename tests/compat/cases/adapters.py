"""Adapters of peft, and transformers of x-transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.compat.case import Cases
from tests.compat.cases.language import GPT2_QUIET, QUIET, bert, gpt2, token_loss
from tests.compat.samples import images, masked_tokens, next_tokens, tokens

CASES = Cases("language", "peft", "transformers")
add = CASES.add


def adapted(base: Callable[[], nn.Module], config: str, kind: str = "SEQ_CLS", **options: Any) -> Any:
    def build() -> nn.Module:
        import peft

        return peft.get_peft_model(base(), getattr(peft, config)(task_type=kind, **options))

    return build


QUERIES = {"r": 2, "target_modules": ["query", "value"], "lora_alpha": 4, "init_lora_weights": "gaussian"}
GPT = {"r": 2, "target_modules": ["c_attn"], "fan_in_fan_out": True, "lora_alpha": 4}
PLAIN_BERT, PLAIN_GPT2 = bert(**QUIET), gpt2(**GPT2_QUIET)
add("LoRA on Bert, as peft makes it", adapted(PLAIN_BERT, "LoraConfig", **QUERIES), masked_tokens())
add("LoRA on Bert, ids alone", adapted(PLAIN_BERT, "LoraConfig", **QUERIES), tokens())
add("LoRA on Bert, lora_dropout=0.3", adapted(
    PLAIN_BERT, "LoraConfig", **QUERIES, lora_dropout=0.3
), tokens(), draws=True)  # fmt: skip
add("LoRA on Bert, Bert's own dropout", adapted(bert(), "LoraConfig", **QUERIES), masked_tokens(), draws=True)
for name, method in {"Scaffold": "Scaffold()", "FedNLR": "FedNLR()", "FedCurv": "FedCurv(weight=0.1)"}.items():
    add(f"LoRA on Bert, {name}", adapted(PLAIN_BERT, "LoraConfig", **QUERIES), tokens(), method=method)
add("LoRA on GPT2", adapted(
    PLAIN_GPT2, "LoraConfig", "CAUSAL_LM", **GPT
), next_tokens(), loss=token_loss, local={"lr": 0.5})  # fmt: skip
add("DoRA on Bert", adapted(PLAIN_BERT, "LoraConfig", **QUERIES, use_dora=True), tokens())
add("IA3 on Bert", adapted(
    PLAIN_BERT, "IA3Config", target_modules=["key", "value", "output.dense"], feedforward_modules=["output.dense"]
), tokens())  # fmt: skip
add("prompt tuning of GPT2", adapted(
    PLAIN_GPT2, "PromptTuningConfig", "CAUSAL_LM", num_virtual_tokens=3
), next_tokens(), loss=lambda z, y: token_loss(z[:, 3:], y), local={"lr": 0.5})  # fmt: skip
add("prefix tuning of GPT2", adapted(
    PLAIN_GPT2, "PrefixTuningConfig", "CAUSAL_LM", num_virtual_tokens=3
), next_tokens(), loss=token_loss, local={"lr": 0.5})  # fmt: skip

CASES.needs = ("x_transformers",)


def decoder(**options: Any) -> Any:
    def build() -> nn.Module:
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=16, depth=2, heads=2, attn_dim_head=8, **options)
        return TransformerWrapper(num_tokens=40, max_seq_len=10, attn_layers=layers)

    return build


def vision() -> nn.Module:
    from x_transformers import Encoder, ViTransformerWrapper

    layers = Encoder(dim=16, depth=2, heads=2, attn_dim_head=8)
    return ViTransformerWrapper(image_size=16, patch_size=4, num_classes=4, attn_layers=layers)


add("x-transformers Decoder", decoder(), next_tokens(), loss=token_loss)
add("x-transformers Decoder, rotary, RMSNorm, SwiGLU", decoder(
    rotary_pos_emb=True, use_rmsnorm=True, ff_swish=True, ff_glu=True
), next_tokens(), loss=token_loss)  # fmt: skip
add("x-transformers Decoder, attn_dropout=0.1", decoder(attn_dropout=0.1), next_tokens(), loss=token_loss, draws=True)
add("x-transformers ViT", vision, images())
