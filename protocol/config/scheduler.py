"""The configuration of each replica's scheduler: its queue, its limits per step, and speculative decoding."""

import enum
from typing import Annotated, Final

import msgspec

from .diffusion import BlockDiffusion, DenoisingAlgorithm, DenoisingConfig
from .hidden_states import HiddenStatesConfig
from .option import option


class SchedulingPolicy(enum.StrEnum):
    """The order in which waiting requests are admitted."""

    FCFS = "fcfs"
    PRIORITY = "priority"
    FAIR = "fair"
    DEADLINE = "deadline"


class PreemptionMode(enum.StrEnum):
    """The treatment of a preempted request's KV blocks if there is CPU KV offload.

    They are dropped (`recompute`), copied to CPU memory immediately (`swap`), or copied when their memory is needed
    (`auto`).
    """

    RECOMPUTE = "recompute"
    SWAP = "swap"
    AUTO = "auto"


class ProposerMethod(enum.StrEnum):
    """The method that proposes draft tokens."""

    NGRAM = "ngram"
    SUFFIX = "suffix"
    DRAFT_MODEL = "draft_model"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"
    DFLASH = "dflash"

    @property
    def runs_model(self) -> bool:
        """True if the proposer runs a model or a layer, which writes its own KV entries."""
        return self.reads_hidden_states or self.needs_checkpoint

    @property
    def reads_hidden_states(self) -> bool:
        """True if the proposer reads the hidden states of the model."""
        return self in _METHODS_OF_HEADS

    @property
    def reads_inner_states(self) -> bool:
        """True if the proposer also reads hidden states of inner layers of the model."""
        return self in (ProposerMethod.EAGLE3, ProposerMethod.DFLASH)

    @property
    def proposes_at_once(self) -> bool:
        """True if one pass proposes all drafts of a request."""
        return self is ProposerMethod.DFLASH

    @property
    def needs_checkpoint(self) -> bool:
        """True if the proposer always has its own checkpoint."""
        return self in _METHODS_WITH_CHECKPOINT

    @property
    def may_have_checkpoint(self) -> bool:
        """True if the proposer may have its own checkpoint."""
        return self.needs_checkpoint or self is ProposerMethod.MTP


_METHODS_WITH_CHECKPOINT: Final = (
    ProposerMethod.DRAFT_MODEL,
    ProposerMethod.EAGLE,
    ProposerMethod.EAGLE3,
    ProposerMethod.DFLASH,
)
_METHODS_OF_HEADS: Final = (
    ProposerMethod.EAGLE,
    ProposerMethod.EAGLE3,
    ProposerMethod.MTP,
    ProposerMethod.DFLASH,
)


class SpeculativeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Speculative decoding: the method that proposes draft tokens, and its limits.

    `ngram` proposes the tokens that followed an earlier occurrence of the last `prompt_lookup_min` or more tokens.
    `suffix` counts the tokens that followed all such occurrences, also in recent answers to other requests, and
    proposes the most frequent (SuffixDecoding, arXiv 2411.04975). `draft_model` runs a smaller model with the same
    vocabulary. `eagle` (arXiv 2401.15077), `eagle3` (arXiv 2503.01840) and `mtp` run a layer that reads the model's
    hidden states. EAGLE heads have their own checkpoint. For `mtp`, the model's checkpoint contains the layer, or
    `model` is a file with that layer, or the assistant of a Gemma 4, a small model that also reads the model's KV
    cache. `dflash` (arXiv 2602.06036) runs layers that propose several tokens in one pass, from the hidden states of
    all tokens. It also reads heads of DSpark.

    Attributes:
        num_speculative_tokens: The maximum number of proposed tokens per step. The scheduler may use fewer for a
            request.
        adaptive: True if the number of drafts of each request follows its acceptance rate and the cost of verification.
            If false, it is always the maximum.
        prompt_lookup_min: The minimum number of tokens that must match.
        model: The directory or file of the draft model, the head or the assistant.
        revision: The branch, tag or commit of a `model` on the hub.
        suffix_decoding_max_tree_depth: The length in tokens above which a longer match counts no more.
        suffix_decoding_max_cached_requests: The number of earlier answers that are searched; 0 searches only the
            request's own tokens.
        suffix_decoding_max_spec_factor: The maximum number of proposed tokens for each matched token.
        suffix_decoding_min_token_prob: The minimum share of the occurrences after which a proposed token must follow.
    """

    num_speculative_tokens: Annotated[int, msgspec.Meta(ge=0, le=64)]
    method: ProposerMethod = ProposerMethod.NGRAM
    adaptive: bool = True
    prompt_lookup_min: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    model: str | None = None
    revision: str | None = None
    suffix_decoding_max_tree_depth: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64
    suffix_decoding_max_cached_requests: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 10_000
    suffix_decoding_max_spec_factor: Annotated[float, msgspec.Meta(gt=0, le=64)] = 1.0
    suffix_decoding_min_token_prob: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.1

    @property
    def num_lookahead_tokens(self) -> int:
        """The number of positions after the computed ones at which the proposer writes KV entries."""
        if not self.method.runs_model:
            return 0
        # A pass that proposes all drafts also writes an entry for the last one.
        return self.num_speculative_tokens + self.method.proposes_at_once

    @property
    def num_levels(self) -> int:
        """The number of levels of confidence in drafts, each of which has a limit of its own.

        A draft model or head proposes as many drafts as allowed, at one level.
        """
        return 1 if self.method.runs_model else 4


_MIN_STEPS_FORESEEN: Final = 4
"""Minimum number of steps in flight whose drafts must fit into the KV cache."""

DEFAULT_SPECULATION: Final = SpeculativeConfig(
    num_speculative_tokens=16, method=ProposerMethod.SUFFIX, suffix_decoding_max_cached_requests=0
)


class SchedulerConfig(msgspec.Struct, frozen=True):
    """The limits of a scheduler step and of the waiting queue.

    Attributes:
        max_num_encoder_input_tokens: Maximum encoder embeddings computed per step; 0 means `max_num_batched_tokens`.
        encoder_cache_size: Maximum encoder embeddings kept; 0 means `max_num_batched_tokens`.
        disable_chunked_mm_input: True if all positions of an encoder input are computed in one step.
        num_micro_batches: Number of groups of decoding requests that take turns, one for each pipeline stage.
        diffusion: The blocks of a block-diffusion model; None for a model that generates token by token.
    """

    policy: Annotated[
        SchedulingPolicy,
        option(
            "Order in which waiting requests are admitted",
            "--schedule-policy",
            name="--scheduling-policy",
        ),
    ] = SchedulingPolicy.FCFS
    max_num_seqs: Annotated[
        int,
        option(
            "Maximum requests that run at once in each replica",
            "--max-running-requests --max-batch-size --parallel -np",
            ge=1,
            le=65536,
            on_cpu=64,
            default_text="256; 1024 on a GPU of 70 GiB or more; 64 on a CPU",
        ),
    ] = 256
    max_num_batched_tokens: Annotated[
        int,
        option(
            "Maximum tokens per step",
            "--max-num-tokens --batch-size -b",
            ge=1,
            on_cpu=512,
            default_text="2048; 8192 on a GPU of 70 GiB or more; 512 on a CPU",
        ),
    ] = 2048
    max_num_queued_reqs: Annotated[
        int,
        option("Maximum waiting requests per replica; 0: unlimited", "--max-queued-requests", ge=0),
    ] = 16384
    max_num_queued_tokens: Annotated[
        int, option("Maximum waiting prompt tokens per replica; 0: unlimited", ge=0)
    ] = 16 * 1024 * 1024
    long_prefill_token_threshold: Annotated[
        int, option("Maximum tokens of one prompt per step; 0: unlimited", ge=0)
    ] = 0
    prefill_step_ms: Annotated[
        float,
        option(
            "Longest step with prompts while others decode, in ms; 0: unlimited",
            ge=0,
            le=60_000,
            on_cpu=150,
            metavar="MS",
            default_text="150 on a CPU, otherwise 0",
        ),
    ] = 0.0
    enable_chunked_prefill: Annotated[
        bool, option("Split long prompts over several steps, batched with other requests' tokens")
    ] = True
    async_scheduling: Annotated[
        bool, option("Schedule the next step before the current one ends")
    ] = True
    inject_preemption: Annotated[
        float, option("For tests: probability of a random preemption in each step", ge=0, le=1)
    ] = 0.0
    max_num_partial_prefills: Annotated[
        int, option("Maximum prompts prefilled in chunks at once; 0: unlimited", ge=0)
    ] = 0
    max_long_partial_prefills: Annotated[
        int,
        option(
            "Maximum partial prefills over --long-prefill-token-threshold at once; 0: unlimited",
            ge=0,
        ),
    ] = 0
    scheduler_delay_factor: Annotated[
        float, option("Delay between admissions, as a multiple of the prefill time", ge=0, le=1000)
    ] = 0.0
    watermark: Annotated[
        float,
        option("Fraction of the KV cache kept free for running requests at admissions", ge=0, le=1),
    ] = 0.0
    priority_preemption: Annotated[
        bool, option("With the priority policy, preempt running requests of lower priority")
    ] = False
    tenant_weights: Annotated[
        dict[str, float], option("Shares of tenants under the fair policy; others have 1")
    ] = {}
    max_loras: Annotated[
        int,
        option(
            "Maximum different LoRA adapters among running requests", "--max-loras-per-batch", ge=1
        ),
    ] = 1
    max_cpu_loras: Annotated[
        int,
        option(
            "Maximum LoRA adapters that stay loaded",
            "--max-loaded-loras",
            ge=1,
            default_text="--max-loras and every one of --lora-modules, at least 8",
        ),
    ] = 8
    max_num_encoder_input_tokens: Annotated[
        int,
        option(
            "Maximum embeddings of images computed per step",
            ge=0,
            default_text="one tile; --max-num-batched-tokens on a GPU",
        ),
    ] = 0
    encoder_cache_size: Annotated[
        int,
        option(
            "Maximum embeddings of images kept in memory",
            ge=0,
            default_text="--max-num-batched-tokens, at least 4096",
        ),
    ] = 0
    disable_chunked_mm_input: Annotated[
        bool, option("Compute all tokens of an image's tile in one step")
    ] = False
    max_num_seqs_per_tenant: Annotated[
        int, option("Maximum running requests per tenant and replica; 0: unlimited", ge=0)
    ] = 0
    max_num_queued_reqs_per_tenant: Annotated[
        int, option("Maximum waiting requests per tenant and replica; 0: unlimited", ge=0)
    ] = 0
    preemption_mode: Annotated[
        PreemptionMode, option("Drop the KV blocks of preempted requests, or offload them")
    ] = PreemptionMode.AUTO
    num_micro_batches: int = 1
    speculative: Annotated[
        SpeculativeConfig | None,
        option(
            "Propose draft tokens without changing output; 0 tokens disables",
            "-sc",
            name="--speculative-config",
            parse="speculative",
            default_text=(
                f"{DEFAULT_SPECULATION.num_speculative_tokens} tokens from repeated text; off on a GPU or "
                "with -pp"
            ),
        ),
    ] = None
    hidden_states: Annotated[
        HiddenStatesConfig | None,
        option(
            'Hidden states that requests may return: {"mode": "full"}',
            parse="hidden_states",
            default_text="none",
        ),
    ] = None
    dllm_algorithm: Annotated[
        DenoisingAlgorithm,
        option("Algorithm that denoises the blocks of a block-diffusion model"),
    ] = DenoisingAlgorithm.LOW_CONFIDENCE
    dllm_algorithm_config: Annotated[
        DenoisingConfig,
        option(
            "YAML file with settings of --dllm-algorithm, such as threshold",
            parse="denoising_file",
            default_text="those of the algorithm and the checkpoint",
        ),
    ] = DenoisingConfig()
    diffusion: BlockDiffusion | None = None
    scheduler_cls: Annotated[
        str | None,
        option(
            "Scheduler class that replaces the built-in one",
            metavar="MODULE.CLASS",
            parse="dotted_name",
        ),
    ] = None

    @property
    def encoder_budget(self) -> int:
        """The maximum number of encoder embeddings computed per step."""
        return self.max_num_encoder_input_tokens or self.max_num_batched_tokens

    @property
    def encoder_cache_capacity(self) -> int:
        """The maximum number of encoder embeddings kept in the encoder cache."""
        return self.encoder_cache_size or self.max_num_batched_tokens

    @property
    def token_unit(self) -> int:
        """The number of a request's tokens that are computed together: 1, or those of a block of masks."""
        return 1 if self.diffusion is None else self.diffusion.token_unit

    @property
    def max_excess_tokens(self) -> int:
        """The number of unknown tokens by which a step of a request may exceed `max_model_len`."""
        return 0 if self.diffusion is None else self.diffusion.max_excess_tokens

    @property
    def max_steps_in_flight(self) -> int:
        """The maximum number of steps in flight.

        There is one for each stage, and with asynchronous scheduling one that is ready when the first stage becomes
        free.
        """
        return self.num_micro_batches + self.async_scheduling

    @property
    def max_uncertain_tokens(self) -> int:
        """The maximum number of one request's tokens in flight that may be rejected; 0 without speculative decoding."""
        if self.speculative is None:
            return 0
        num_steps = max(self.max_steps_in_flight, _MIN_STEPS_FORESEEN)
        tokens_per_step = self.speculative.num_speculative_tokens + 1
        return self.speculative.num_lookahead_tokens + num_steps * tokens_per_step
