"""What the simulator knows of a model: the shape fields of a Hugging Face config.json and the parameters they imply."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxsim.errors import ConfigError
from jaxsim.presets import require, typed

# Bytes per parameter of the quantised matrices. int4 is AWQ or GPTQ in groups of 128: 4 bits, and per group a 16-bit
# scale and a 4-bit zero point.
WEIGHT_BYTES = {"bfloat16": 2.0, "float16": 2.0, "float8": 1.0, "int4": 0.5 + 2.5 / 128}
KV_BYTES = {"auto": 2, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
VOCAB_PADDING = 64  # vLLM pads the vocabulary to a multiple of this

_EXPERT_NAMES = ("num_local_experts", "n_routed_experts")  # Mixtral's and DeepSeek's names of num_experts
_DTYPES = {"torch.bfloat16": "bfloat16", "torch.float16": "float16", "float32": "bfloat16", "half": "float16"}
_QUANTISATION = {"fp8": "float8", "awq": "int4", "gptq": "int4"}


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """A decoder-only transformer with full attention in every layer; field names are those of config.json.

    `dtype` is that of the matrices inside the layers; embedding, output head, norms and routers stay in 16 bits.
    `kv_cache_dtype="auto"` keeps the cache in 16 bits, whatever the weights are.
    `num_experts = 0` is a dense model, `kv_lora_rank = 0` one without multi-head latent attention (MLA).
    Raises ConfigError (key `model.FIELD`) for impossible values.
    """

    name: str
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    num_key_value_heads: int = 0  # 0: as many as attention heads (MHA)
    head_dim: int = 0  # 0: hidden_size / num_attention_heads
    tie_word_embeddings: bool = False
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "auto"
    hf_id: str = ""
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0  # 0: intermediate_size
    n_shared_experts: int = 0
    first_k_dense_replace: int = 0  # leading layers without experts
    q_lora_rank: int = 0
    kv_lora_rank: int = 0
    qk_nope_head_dim: int = 0
    qk_rope_head_dim: int = 0
    v_head_dim: int = 0

    def __post_init__(self) -> None:
        derived = {
            "num_key_value_heads": self.num_attention_heads,
            "head_dim": self.hidden_size // max(self.num_attention_heads, 1),
            "moe_intermediate_size": self.intermediate_size,
            "hf_id": self.name,
        }
        for key, value in derived.items():
            if not getattr(self, key):
                object.__setattr__(self, key, value)
        require("model", self, "hidden_size num_hidden_layers num_attention_heads num_key_value_heads head_dim")
        require("model", self, "intermediate_size vocab_size max_position_embeddings moe_intermediate_size")
        require("model", self, "num_experts n_shared_experts first_k_dense_replace q_lora_rank kv_lora_rank", zero=True)
        require("model", self, "num_key_value_heads", upto=self.num_attention_heads)
        if self.num_attention_heads % self.num_key_value_heads:
            allowed = f"a divisor of num_attention_heads={self.num_attention_heads}"
            raise ConfigError("model.num_key_value_heads", self.num_key_value_heads, allowed)
        if self.num_experts:
            require("model", self, "num_experts_per_tok", upto=self.num_experts)
        if self.kv_lora_rank:
            require("model", self, "qk_nope_head_dim qk_rope_head_dim v_head_dim")
        for key, known in (("dtype", WEIGHT_BYTES), ("kv_cache_dtype", KV_BYTES)):
            if getattr(self, key) not in known:
                raise ConfigError(f"model.{key}", getattr(self, key), f"one of {', '.join(known)}")

    @property
    def moe_layers(self) -> int:
        """Layers whose feed-forward part is a mixture of experts."""
        return max(0, self.num_hidden_layers - self.first_k_dense_replace) if self.num_experts else 0

    @property
    def kv_dims(self) -> int:
        """Numbers cached per token and layer on one GPU that holds all KV heads: K and V, or MLA's latent vector."""
        if self.kv_lora_rank:
            return self.kv_lora_rank + self.qk_rope_head_dim
        return 2 * self.num_key_value_heads * self.head_dim


class Parameters(NamedTuple):
    """Parameter counts on one GPU, summed over layers."""

    embedding: int
    attention: int
    mlp: int  # dense feed-forward layers and shared experts
    experts: int  # all routed experts
    other: int  # norms and routers, never quantised
    head: int  # the output matrix that is multiplied; also there when it shares the embedding's memory


def model_from_mapping(values: Mapping[str, Any]) -> ModelSpec:
    """The model of the configuration group `model`; `config_json` in it names a file that replaces the architecture.

    `dtype` then comes from the file too; `kv_cache_dtype` from the group. Raises ConfigError.
    """
    given = {key: value for key, value in values.items() if key != "config_json"}
    if values.get("config_json"):
        return model_from_config_json(values["config_json"], kv_cache_dtype=given.get("kv_cache_dtype", "auto"))
    return typed("model", ModelSpec, _canonical(given))


def model_from_config_json(path: str | Path, kv_cache_dtype: str = "auto") -> ModelSpec:
    """The model a Hugging Face config.json describes; fields that say nothing about speed or memory are ignored.

    Raises ConfigError (key `model.config_json`) for a file that is missing, broken or describes layers other than
    full attention, which have no place in ModelSpec.
    """
    key, path = "model.config_json", Path(path)
    if path.is_dir():
        path = path / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except OSError:
        raise ConfigError(key, path, "a readable Hugging Face config.json") from None
    except ValueError as error:
        raise ConfigError(key, path, f"a JSON file, this one breaks off: {error}") from None
    if not isinstance(raw, dict):
        raise ConfigError(key, path, "a JSON object")
    nested = raw.get("text_config")  # multimodal models keep the language model's fields there
    text = {**raw, **nested} if isinstance(nested, dict) else raw
    if reason := _unsupported(text):
        raise ConfigError(key, path, reason)
    quantisation = text.get("quantization_config") or {}
    dtype = str(text.get("torch_dtype") or text.get("dtype") or "bfloat16")
    if quantisation:
        method = str(quantisation.get("quant_method"))
        if method not in _QUANTISATION or quantisation.get("bits", quantisation.get("w_bit", 4)) != 4:
            raise ConfigError(key, path, "weights without quantisation, in fp8, or in 4 bits by awq or gptq")
        dtype = _QUANTISATION[method]
    name = raw.get("_name_or_path") or path.resolve().parent.name
    fields = {field.name for field in dataclasses.fields(ModelSpec)} | set(_EXPERT_NAMES)
    known = {name: value for name, value in text.items() if name in fields and value is not None}
    known |= {"name": str(name), "hf_id": str(name), "dtype": _DTYPES.get(dtype, dtype)}
    return typed("model", ModelSpec, _canonical(known) | {"kv_cache_dtype": kv_cache_dtype})


def check_tensor_parallel(model: ModelSpec, tensor_parallel_size: int) -> None:
    """Raises ConfigError unless heads and feed-forward rows can be dealt out evenly, as vLLM demands."""
    tp, key = tensor_parallel_size, "engine.tensor_parallel_size"
    if tp < 1:
        raise ConfigError(key, tp, "at least 1")
    if model.num_attention_heads % tp:
        raise ConfigError(key, tp, f"a divisor of num_attention_heads={model.num_attention_heads}")
    kv_heads = model.num_key_value_heads
    if not model.kv_lora_rank and max(kv_heads, tp) % min(kv_heads, tp):
        raise ConfigError(key, tp, f"a divisor or a multiple of num_key_value_heads={kv_heads}")
    rows = model.moe_intermediate_size if model.moe_layers else model.intermediate_size
    if rows % tp:
        raise ConfigError(key, tp, f"a divisor of the feed-forward size {rows}")


def parameters(model: ModelSpec, tensor_parallel_size: int = 1) -> Parameters:
    """Parameter counts on one of `tensor_parallel_size` GPUs; with 1, those of the whole model.

    KV heads are copied when there are fewer than GPUs; norms, routers and MLA's two down-projections are on every GPU
    (vLLM 0.33.0, model_executor/layers/linear.py and models/deepseek_v2.py). Biases are left out.
    """
    tp, hidden, layers = tensor_parallel_size, model.hidden_size, model.num_hidden_layers
    heads = model.num_attention_heads // tp
    if model.kv_lora_rank:
        query_dim = model.qk_nope_head_dim + model.qk_rope_head_dim
        query_in = model.q_lora_rank or hidden
        attention = hidden * (model.q_lora_rank + model.kv_lora_rank + model.qk_rope_head_dim)
        attention += query_in * heads * query_dim
        attention += model.kv_lora_rank * heads * (model.qk_nope_head_dim + model.v_head_dim)
        attention += heads * model.v_head_dim * hidden
    else:
        kv_heads = max(1, model.num_key_value_heads // tp)
        attention = hidden * model.head_dim * (2 * heads + 2 * kv_heads)
    expert = 3 * hidden * model.moe_intermediate_size // tp
    dense = 3 * hidden * model.intermediate_size // tp
    vocab = -(-model.vocab_size // VOCAB_PADDING) * VOCAB_PADDING * hidden // tp
    return Parameters(
        embedding=vocab,
        attention=layers * attention,
        mlp=(layers - model.moe_layers) * dense + model.moe_layers * model.n_shared_experts * expert,
        experts=model.moe_layers * model.num_experts * expert,
        other=(2 * layers + 1) * hidden + model.moe_layers * model.num_experts * hidden,
        head=vocab,
    )


def weight_bytes(model: ModelSpec, tensor_parallel_size: int = 1) -> int:
    """Bytes of weights on one GPU: matrices in `dtype`, embedding, head, norms and routers in 16 bits."""
    count = parameters(model, tensor_parallel_size)
    matrices = (count.attention + count.mlp + count.experts) * WEIGHT_BYTES[model.dtype]
    head = 0 if model.tie_word_embeddings else count.head
    return round(matrices + 2 * (count.embedding + head + count.other))


def kv_bytes_per_token(model: ModelSpec, tensor_parallel_size: int = 1) -> int:
    """KV cache bytes of one token on one GPU. KV heads are split and then copied; MLA's latent vector is not split."""
    dims = model.kv_dims
    if not model.kv_lora_rank:
        dims = dims // model.num_key_value_heads * max(1, model.num_key_value_heads // tensor_parallel_size)
    return model.num_hidden_layers * dims * KV_BYTES[model.kv_cache_dtype]


def _canonical(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same values under ModelSpec's names; null stands for the default."""
    known = {key: value for key, value in values.items() if value is not None}
    return {"num_experts" if key in _EXPERT_NAMES else key: value for key, value in known.items()}


def _unsupported(config: Mapping[str, Any]) -> str:
    """What ModelSpec cannot express of a config.json, as what is allowed; empty if nothing."""
    layers = set(config.get("layer_types") or ["full_attention"])
    slides = config.get("sliding_window") and config.get("use_sliding_window", True)
    if layers != {"full_attention"} or slides or config.get("is_encoder_decoder"):
        return "a decoder with full attention in every layer"
    every = [config.get(key, 1) for key in ("decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step")]
    if every != [1, 1, 1] or config.get("mlp_only_layers") or config.get("shared_expert_intermediate_size"):
        return "experts of one size in every layer after first_k_dense_replace"
    return ""
