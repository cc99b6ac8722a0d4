"""What the KV of a draft model depends on: the identity of the namespace its blocks are kept in, or why there is none.

Rules:
1. A draft model reads tokens and nothing of the model it drafts for, so the model takes no part in its identity: a vLLM
   that serves the small model itself shares its blocks.
2. Drafters that read the model's hidden states (EAGLE, MTP and the like) keep something else. Their KV of a position
   depends on the token after it too, so the key of a block does not name what is in it. Theirs is not kept.
3. Attributes of vLLM's config objects are read by name and nothing of vLLM is imported.
"""

from dataclasses import dataclass
from typing import Any, Final

from prefixcache_vllm.identity import (
    CannotShareError,
    EngineIdentity,
    RunModel,
    is_draft,
    model_identity,
)
from prefixcache_vllm.options import Options

METHOD: Final = "draft_model"


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A draft model's identity. `engine`: its layers by KV cache group, as the model's.

    `most_tokens`: the longest sequence of a step in which it still runs. Where one is longer, it sits the whole step
    out, and has no KV of any token of it. `proposals`: tokens that it proposes in a step. `dtype`: what it computes in;
    `cache_dtype`: vLLM's setting for its KV cache.
    """

    engine: EngineIdentity
    most_tokens: int
    proposals: int
    dtype: Any
    cache_dtype: str

    @property
    def group(self) -> int:
        """The KV cache group by whose table its pages are found; vLLM keeps all its layers in one."""
        return next(number for number, group in enumerate(self.engine.groups) if group.layers)


def draft_identity(vllm_config: Any, kv_cache_config: Any, options: Options) -> DraftModel:
    """The draft model of an engine that has layers of one. Raises CannotShareError."""
    speculation: Any = getattr(vllm_config, "speculative_config", None)
    method = str(getattr(speculation, "method", None) or "unknown")
    if method != METHOD:
        raise CannotShareError(method, "this drafter's KV depends on more than the tokens in front of it")
    for name, reason in (("use_heterogeneous_vocab", "draft_vocabulary"), ("parallel_drafting", "parallel_drafting")):
        if getattr(speculation, name, False):
            raise CannotShareError(reason, f"with {name} a draft model reads other tokens than the model")
    if int(getattr(vllm_config.parallel_config, "pipeline_parallel_size", 1)) > 1:
        raise CannotShareError("pipeline_parallel", "the last stage alone has the draft model")
    config = speculation.draft_model_config
    cache_dtype = str(getattr(speculation, "kv_cache_dtype", None) or vllm_config.cache_config.cache_dtype)
    engine = model_identity(vllm_config, kv_cache_config, options, RunModel(config, cache_dtype, is_draft))
    if engine.hybrid:
        raise CannotShareError("draft_windows", "draft models with sliding windows are not supported yet")
    proposals = int(speculation.num_speculative_tokens)
    return DraftModel(engine, int(config.max_model_len) - proposals, proposals, config.dtype, cache_dtype)
