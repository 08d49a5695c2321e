"""Preference pairs: of two completions of a prompt the chosen one becomes likelier than the rejected one.

The policy pi is compared with a frozen reference by the log-ratio of a whole completion y of the prompt x,

    h(y) = log pi(y | x) - log ref(y | x) = sum_t log pi(y_t | x, y_<t) - log ref(y_t | x, y_<t)

and beta h is the completion's implicit reward. With y_w chosen and y_l rejected, what is minimised is the mean over
pairs of

    sigmoid   -log sigmoid(beta (h(y_w) - h(y_l)))                  DPO: Rafailov et al. 2023, arXiv 2305.18290, eq. 7
    ipo       (h(y_w) / |y_w| - h(y_l) / |y_l| - 1 / (2 beta))^2    IPO: Azar et al. 2023, arXiv 2310.12036, eq. 17

IPO's log-ratios are those of a token, |y| being the trained tokens: so the paper's results were had, as TRL found out
from its authors. The gradient of DPO's is that of the two log-probabilities, weighted by how wrong the pair is:

    -beta sigmoid(-beta (h(y_w) - h(y_l))) (grad log pi(y_w | x) - grad log pi(y_l | x))

Shapes: B rows of a micro-batch, chosen and rejected in turns; P = B / 2 pairs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from groupwise.config.preference import PreferenceConfig
from groupwise.types import Sample

Pair = tuple[Sample, Sample]  # chosen, rejected


def pairs_of(shown: Sequence[Sample]) -> list[Pair]:
    """Return the demonstrations of a dataset of preferences (`algo.distillation.demonstrations`) as the pairs that they
    are: each group has two, the chosen one first."""
    return list(zip(shown[0::2], shown[1::2], strict=True))


def preference_loss(
    logprobs_B: Tensor, reference_B: Tensor, tokens_B: Tensor, config: PreferenceConfig, *, pairs: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a micro-batch's share of the mean over the batch's `pairs` (a scalar to call `backward` on), and its share
    of the metrics.

    Args:
        logprobs_B: log pi(y | x) in nats of each completion, with its graph; chosen and rejected in turns.
        reference_B: the same under the reference.
        tokens_B: the number of tokens in each sum.
    """
    log_ratio_B = logprobs_B - reference_B
    by_token_B = log_ratio_B / tokens_B.to(log_ratio_B)
    if config.loss == "sigmoid":
        margin_P = log_ratio_B[0::2] - log_ratio_B[1::2]
        loss_P = -torch.nn.functional.logsigmoid(config.beta * margin_P)
    else:
        loss_P = (by_token_B[0::2] - by_token_B[1::2] - 1 / (2 * config.beta)).square()
    reward_B = config.beta * log_ratio_B.detach()
    chosen_P, rejected_P = reward_B[0::2], reward_B[1::2]
    loss = loss_P.sum() / pairs
    metrics = {
        "loss/preference": loss,
        "preference/chosen_reward": chosen_P.sum() / pairs,
        "preference/rejected_reward": rejected_P.sum() / pairs,
        "preference/margin": (chosen_P - rejected_P).sum() / pairs,
        "preference/accuracy": (chosen_P > rejected_P).to(reward_B).sum() / pairs,
        "preference/chosen_gain": by_token_B[0::2].sum() / pairs,
        "preference/chosen_logprob": logprobs_B[0::2].sum() / pairs,
        "preference/rejected_logprob": logprobs_B[1::2].sum() / pairs,
    }
    return loss, {name: value.detach() for name, value in metrics.items()}
