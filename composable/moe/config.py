"""What a mixture of experts is: values only, and the router rules of published families."""

from dataclasses import dataclass, field
from typing import Literal, get_args

Dispatcher = Literal["all_to_all", "hierarchical", "static"]


@dataclass(frozen=True)
class Balance:
    """Losses that keep experts equally loaded (coefficients; 0 is off), and the update without a loss."""

    switch: float = 0.0
    """frequency x probability (Fedus et al. 2021, arXiv:2101.03961, eq. 4), 1 when balanced whatever top_k"""
    kl: float = 0.0
    """Kullback-Leibler divergence of the load from uniform, 0 when balanced"""
    sequence: float = 0.0
    """frequency x probability within each sequence (DeepSeek-V3, arXiv:2412.19437, eq. 17), 1 when balanced"""
    z: float = 0.0
    """mean squared log-sum-exp of the router's logits (Zoph et al. 2022, arXiv:2202.08906, eq. 5)"""
    scope: Literal["micro_batch", "global"] = "micro_batch"
    """which tokens the frequencies of `switch` and `kl` count: those of a micro-batch, or all of the step"""
    bias_rate: float = 0.0
    """step of the score-correction bias after each optimizer step (Wang et al. 2024, arXiv:2408.15664)"""

    def __post_init__(self) -> None:
        for name in ("switch", "kl", "sequence", "z", "bias_rate"):
            if getattr(self, name) < 0:
                raise ValueError(f"moe.balance.{name}={getattr(self, name)}: it is 0 (off) or positive")

    @property
    def losses(self) -> dict[str, float]:
        """name -> coefficient of those that are on."""
        return {name: getattr(self, name) for name in ("switch", "kl", "sequence", "z") if getattr(self, name)}

    @property
    def counts_step(self) -> bool:
        """Whether a loss that is on asks for the choices of the whole step."""
        return self.scope == "global" and bool(self.switch or self.kl)


@dataclass(frozen=True)
class Capacity:
    """How many tokens of a micro-batch an expert takes at most."""

    factor: float = 0.0
    """ceil(factor x tokens x top_k / experts) tokens of a micro-batch for each expert; 0: all (dropless)"""
    overflow: Literal["drop_weight", "drop_position", "next"] = "drop_weight"
    """beyond it: the lowest weights are dropped; the last tokens are dropped; or these ask their next best expert"""

    def __post_init__(self) -> None:
        if self.factor < 0:
            raise ValueError(f"moe.capacity.factor={self.factor}: it is 0 (dropless) or positive, for example 1.25")
        if not self.factor and self.overflow != "drop_weight":
            raise ValueError(
                f"moe.capacity.overflow={self.overflow} without a capacity: experts take every token; give "
                "moe.capacity.factor too, for example 1.25"
            )


@dataclass(frozen=True)
class Exploration:
    """Randomness of the router in training: a function of the seed, step, layer and the token's index in the step."""

    jitter: float = 0.0
    """the router's input is multiplied by uniform numbers of [1 - jitter, 1 + jitter]"""
    noise: Literal["none", "gaussian", "gumbel"] = "none"
    """added to the logits"""
    noise_scale: float = 1.0
    temperature: float = 1.0
    """logits are divided by it at step 0, by `temperature_end` from step `temperature_steps` on, linearly between"""
    temperature_end: float = 1.0
    """used outside of training too; other than 1 it is a rule that exported checkpoints do not carry"""
    temperature_steps: int = 0
    expert_dropout: float = 0.0
    """probability with which an expert is hidden from a token; the top_k luckiest stay visible"""

    def __post_init__(self) -> None:
        for name in ("jitter", "expert_dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"moe.exploration.{name}={getattr(self, name)}: it is 0 (off) or more, and below 1")
        for name in ("temperature", "temperature_end"):
            if getattr(self, name) <= 0:
                raise ValueError(f"moe.exploration.{name}={getattr(self, name)}: a temperature is positive; 1 is none")
        for name in ("noise_scale", "temperature_steps"):
            if getattr(self, name) < 0:
                raise ValueError(f"moe.exploration.{name}={getattr(self, name)}: it is 0 or positive")
        if self.temperature != self.temperature_end and not self.temperature_steps:
            raise ValueError(
                f"moe.exploration.temperature={self.temperature} with temperature_end={self.temperature_end} and "
                "temperature_steps=0: it would never be used; write the steps in which it goes from one to the other"
            )

    @property
    def draws(self) -> bool:
        """Whether training differs from evaluation."""
        annealed = self.temperature_steps > 0 and self.temperature != self.temperature_end
        return self.jitter > 0 or self.noise != "none" or annealed or self.expert_dropout > 0


@dataclass(frozen=True)
class MoEConfig:
    """Router, experts and balance of the layers that have experts."""

    experts: int = 8
    """routed experts of a layer"""
    top_k: int = 2
    """experts that a token goes to"""
    ffn: int = 128
    """hidden width of an expert"""
    shared_ffn: int = 0
    """hidden width of the expert that every token passes (of n shared experts: n times theirs); 0: none"""
    shared_gate: bool = False
    """the shared expert's output is multiplied by the sigmoid of a learnt product (Qwen2-MoE)"""
    score: Literal["softmax", "topk_softmax", "sigmoid"] = "softmax"
    """of a token for each expert; `topk_softmax`: softmax over the logits of the chosen experts only"""
    normalise: bool = True
    """a token's weights are divided by their sum"""
    scale: float = 1.0
    """factor on all weights"""
    correction: bool = False
    """a bias `e_score_correction_bias` is added to the scores for choosing, not for the weights"""
    groups: int = 1
    """experts are in that many equal groups, in order"""
    groups_kept: int = 1
    """a token chooses among the experts of its best groups"""
    group_score: Literal["top2_sum", "max"] = "top2_sum"
    """of a group: the sum of its two best scores (DeepSeek-V3) or its best score (DeepSeek-V2)"""
    router_bias: bool = False
    """the router's logits have a learnt bias (gpt-oss)"""
    expert_bias: bool = False
    """the projections of experts have biases (gpt-oss)"""
    swiglu_limit: float = 0.0
    """experts clamp SwiGLU's gate and up at it, and multiply by up + 1 (gpt-oss: 7); 0: plain SwiGLU"""
    fused: bool = False
    """gate and up of all experts are one stack in memory and in checkpoints, their rows in turns (gpt-oss)"""
    first_dense: int = 0
    """layers at the bottom that stay dense"""
    balance: Balance = field(default_factory=Balance)
    capacity: Capacity = field(default_factory=Capacity)
    exploration: Exploration = field(default_factory=Exploration)
    upcycle: bool = False
    """the weights that a new run starts from are a dense model's: each expert is a copy, or a part, of its SwiGLU"""
    granularity: int = 1
    """upcycling: how many experts, of that part of its width each, make one copy of the dense SwiGLU"""
    dispatcher: Dispatcher = "all_to_all"
    """`all_to_all`: uneven splits, nothing padded, one host synchronisation; `hierarchical`: the same in two, inside
    the node and then across; `static`: blocks of the capacity's size, for accelerators: no host synchronisation"""

    def __post_init__(self) -> None:
        for name in ("experts", "top_k", "ffn", "groups", "groups_kept", "granularity"):
            if getattr(self, name) < 1:
                raise ValueError(f"moe.{name}={getattr(self, name)}: it is 1 or more")
        for name in ("shared_ffn", "first_dense"):
            if getattr(self, name) < 0:
                raise ValueError(f"moe.{name}={getattr(self, name)}: it is 0 or more")
        if self.swiglu_limit < 0:
            raise ValueError(f"moe.swiglu_limit={self.swiglu_limit}: it is 0 (plain SwiGLU) or positive, as 7")
        if self.scale <= 0:
            raise ValueError(f"moe.scale={self.scale}: weights are multiplied by it, so it is positive; 1 leaves them")
        self._check_groups()
        if self.shared_gate and not self.shared_ffn:
            raise ValueError(
                "moe.shared_gate=True with moe.shared_ffn=0: there is no shared expert to gate; set its width"
            )
        if self.balance.bias_rate and not self.correction:
            raise ValueError(
                f"moe.balance.bias_rate={self.balance.bias_rate} with moe.correction=False: the update moves the "
                "score-correction bias; set moe.correction"
            )
        if self.exploration.expert_dropout and self.groups > 1:
            raise ValueError(
                f"moe.exploration.expert_dropout={self.exploration.expert_dropout} with moe.groups={self.groups}: a "
                "group may have all its experts hidden; write 0, or moe.groups 1"
            )
        if self.dispatcher not in get_args(Dispatcher):
            names = ", ".join(get_args(Dispatcher))
            raise ValueError(f"moe.dispatcher={self.dispatcher!r} does not exist; write one of {names}")
        if self.dispatcher == "static" and not self.capacity.factor:
            raise ValueError(
                "moe.dispatcher='static' with moe.capacity.factor=0.0 (dropless): blocks of fixed size need a "
                "capacity; write moe.capacity.factor 1.25 for example, or moe.dispatcher all_to_all"
            )

    def _check_groups(self) -> None:
        if self.experts % self.groups:
            legal = [n for n in range(1, self.experts + 1) if self.experts % n == 0]
            near = min(legal, key=lambda n: abs(n - self.groups))
            raise ValueError(
                f"moe.groups={self.groups} with moe.experts={self.experts}: groups are equal, so their number divides "
                f"the experts; the nearest is {near}"
            )
        if self.groups_kept > self.groups:
            raise ValueError(
                f"moe.groups_kept={self.groups_kept}: there are moe.groups={self.groups}; keep at most those"
            )
        choice = self.experts // self.groups * self.groups_kept
        if self.top_k > choice:
            raise ValueError(
                f"moe.top_k={self.top_k}: a token chooses among {choice} of the {self.experts} experts "
                f"({self.groups_kept} of {self.groups} groups); write at most {choice}"
            )


def mixtral(experts: int = 8, top_k: int = 2, ffn: int = 14336) -> MoEConfig:
    """Mixtral (Jiang et al. 2024, arXiv:2401.04088): softmax over the chosen logits."""
    return MoEConfig(experts, top_k, ffn, score="softmax", normalise=True)


def qwen3_moe(experts: int = 128, top_k: int = 8, ffn: int = 768, normalise: bool = True) -> MoEConfig:
    """Qwen3-MoE (arXiv:2505.09388); `normalise` is the `norm_topk_prob` of its config.json."""
    return MoEConfig(experts, top_k, ffn, score="softmax", normalise=normalise)


def olmoe(experts: int = 64, top_k: int = 8, ffn: int = 1024, normalise: bool = False) -> MoEConfig:
    """OLMoE (Muennighoff et al. 2024, arXiv:2409.02060): softmax over all experts, weights as they are."""
    return MoEConfig(experts, top_k, ffn, score="softmax", normalise=normalise)


def deepseek_v3(
    experts: int = 256,
    top_k: int = 8,
    ffn: int = 2048,
    shared_ffn: int = 2048,
    groups: int = 8,
    groups_kept: int = 4,
    scale: float = 2.5,
    first_dense: int = 3,
) -> MoEConfig:
    """DeepSeek-V3 (arXiv:2412.19437): sigmoid scores, a bias for choosing, experts of the best groups only."""
    return MoEConfig(
        experts,
        top_k,
        ffn,
        shared_ffn,
        score="sigmoid",
        normalise=True,
        scale=scale,
        correction=True,
        groups=groups,
        groups_kept=groups_kept,
        first_dense=first_dense,
    )


def gpt_oss(experts: int = 128, top_k: int = 4, ffn: int = 2880, limit: float = 7.0) -> MoEConfig:
    """gpt-oss (arXiv:2508.10925): biased logits, softmax over the chosen ones; biased experts, clamped SwiGLU."""
    return MoEConfig(
        experts,
        top_k,
        ffn,
        score="topk_softmax",
        normalise=False,
        router_bias=True,
        expert_bias=True,
        swiglu_limit=limit,
        fused=True,
    )
