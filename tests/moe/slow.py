"""What a mixture of experts is, in plain Python: slow, and plainly right."""

import math

import torch
import torch.nn.functional as F

from composable.moe.router import choose, preference, probabilities, score


def executed(chosen, logits, config, index, mask, bias):
    """Choices [T][K] once every expert takes at most its share, by queues."""
    k, experts = config.top_k, config.experts
    room = max(0, math.ceil(config.capacity.factor * sum(mask) * k / experts - 1e-9))
    order = sorted((t for t in range(len(mask)) if mask[t]), key=lambda t: index[t])
    out = [[-1] * k for _ in mask]
    if config.capacity.overflow != "next":
        asked = [(t, c) for t in order for c in range(k)]
        if config.capacity.overflow == "drop_weight":
            asked.sort(key=lambda tc: -chosen.weights[tc].float().item())
        left = [room] * experts
        for t, c in asked:
            e = chosen.ids[t, c].item()
            if left[e]:
                left[e] -= 1
                out[t][c] = e
        return out
    wish, by = preference(score(logits, config), config, bias).tolist(), probabilities(logits, config).float().tolist()
    left, held = [room] * experts, {t: [] for t in order}
    while True:
        queues = [[] for _ in range(experts)]
        for t in order:
            free = [e for e in range(experts) if left[e] and e not in held[t] and wish[t][e] > -math.inf]
            for e in sorted(free, key=lambda e: (-wish[t][e], e))[: k - len(held[t])]:
                queues[e].append(t)
        if not any(queues):
            break
        full = left[:]
        admitted = [sorted(queue, key=lambda t, e=e: -by[t][e])[: full[e]] for e, queue in enumerate(queues)]
        for t in order:
            free = sorted((e for e in range(experts) if t in admitted[e]), key=lambda e: (-wish[t][e], e))
            held[t] += free
        left = [room - sum(e in row for row in held.values()) for e in range(experts)]
    for t in order:
        out[t][: len(held[t])] = held[t]
    return out


def expert(experts, e, token):
    """One expert of one token [D], by the attributes of `Experts` alone."""
    if experts.fused:
        gate, up = experts.gate_up_proj[e][0::2] @ token, experts.gate_up_proj[e][1::2] @ token
        if experts.bias:
            gate, up = gate + experts.gate_up_bias[e][0::2], up + experts.gate_up_bias[e][1::2]
    else:
        gate, up = experts.gate_proj[e] @ token, experts.up_proj[e] @ token
        if experts.bias:
            gate, up = gate + experts.gate_bias[e], up + experts.up_bias[e]
    if experts.limit:
        gate, up = gate.clamp(max=experts.limit), up.clamp(min=-experts.limit, max=experts.limit)
        out = experts.down_proj[e] @ ((up + 1) * gate * torch.sigmoid(1.702 * gate))
    else:
        out = experts.down_proj[e] @ (F.silu(gate) * up)
    return out + experts.down_bias[e] if experts.bias else out


def layer(moe, x, mask=None):
    """The layer by a loop over tokens and their experts, without capacity; x [B, S, D]."""
    config = moe.config
    out = []
    for token in x.flatten(0, 1):
        logits = moe.gate.weight @ token
        if moe.gate.bias is not None:
            logits = logits + moe.gate.bias
        scores = score(logits[None], config)
        ids = choose(scores, config, moe.gate.e_score_correction_bias)[0].tolist()
        values = scores[0, ids]
        if config.score == "topk_softmax":
            values = values.softmax(-1)
        if config.normalise:
            values = values / values.sum()
        total = torch.zeros_like(token)
        for e, weight in zip(ids, values * config.scale, strict=True):
            total = total + weight * expert(moe.experts, e, token)
        if moe.shared_experts is not None:
            shared = moe.shared_experts(token)
            if moe.shared_expert_gate is not None:
                shared = shared * moe.shared_expert_gate(token).sigmoid()
            total = total + shared
        out.append(total)
    return torch.stack(out).view_as(x)
