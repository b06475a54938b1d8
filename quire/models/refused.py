"""Architectures that Quire knows by name and does not run, and why: said instead of a list of those it runs."""

from __future__ import annotations

_STATE = (
    "some or all of its layers keep a recurrent state instead of keys and values (Mamba, linear attention, short "
    "convolutions), and Quire has attention layers only"
)
_EXPERTS = "it is a mixture of experts of a kind that Quire does not know"
_LATENT = "it has latent attention (MLA) with parts that Quire does not know"

_HUGGING_FACE: dict[str, tuple[str, ...]] = {
    _STATE: (
        *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
        *("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "GraniteMoeHybridForCausalLM"),
        *("Lfm2ForCausalLM", "Lfm2MoeForCausalLM", "JambaForCausalLM", "BambaForCausalLM", "MambaForCausalLM"),
        *("Mamba2ForCausalLM", "FalconMambaForCausalLM", "FalconH1ForCausalLM", "ZambaForCausalLM"),
        *("Zamba2ForCausalLM", "NemotronHForCausalLM", "RecurrentGemmaForCausalLM", "OlmoHybridForCausalLM"),
        *("KimiLinearForCausalLM", "MiniMaxForCausalLM", "BailingHybridForCausalLM", "RwkvForCausalLM"),
        *("xLSTMForCausalLM", "Lfm2VlForConditionalGeneration", "ZayaForCausalLM", "InklingForCausalLM"),
        *("InklingForConditionalGeneration", "Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration"),
        "Glm5NextForConditionalGeneration",
    ),
    _EXPERTS: (
        *("FlexOlmoForCausalLM", "GraniteMoeForCausalLM"),
        *("GraniteMoeSharedForCausalLM", "PhimoeForCausalLM", "DbrxForCausalLM", "JetMoeForCausalLM"),
        *("Llama4ForCausalLM", "Llama4ForConditionalGeneration", "Ernie4_5_MoeForCausalLM"),
        *("HunYuanMoEV1ForCausalLM", "MiniMaxM2ForCausalLM", "Dots1ForCausalLM", "Cohere2MoeForCausalLM"),
        *("MiMoV2FlashForCausalLM", "AfmoeForCausalLM", "ExaoneMoeForCausalLM", "SolarOpenForCausalLM"),
    ),
    _LATENT: (
        *("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM"),
        *("Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM", "LongcatFlashForCausalLM"),
    ),
}
_GGUF: dict[str, tuple[str, ...]] = {
    _STATE: (
        *("qwen3next", "qwen35", "qwen35moe", "granitehybrid", "lfm2", "lfm2moe", "jamba", "mamba", "mamba2"),
        *("falcon-h1", "nemotron_h", "nemotron_h_moe", "plamo2", "kimi-linear", "rwkv6", "rwkv6qwen2", "rwkv7"),
        "arwkv7",
    ),
    _EXPERTS: (
        *("granitemoe", "phimoe", "dbrx", "llama4", "grok"),
        *("ernie4_5-moe", "hunyuan-moe", "minimax-m2", "dots1", "bailingmoe", "bailingmoe2", "arctic", "deepseek"),
        *("afmoe", "exaone-moe", "grovemoe", "mimo2", "smallthinker"),
    ),
    _LATENT: ("glm-dsa", "mistral4"),
}
_WHY = {name: why for group in (_HUGGING_FACE, _GGUF) for why, names in group.items() for name in names}


def reason(architecture: str) -> str | None:
    """Why Quire does not run an architecture (its name in config.json or in GGUF); None for a name it never heard."""
    return _WHY.get(architecture)
