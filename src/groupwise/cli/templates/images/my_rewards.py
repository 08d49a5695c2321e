"""The reward of my_run.yaml."""


def exact(completions, answer, **columns) -> list[float]:
    """Return 1 for the answer and nothing else. To see the picture too, add a parameter `image`: a PIL image for each
    completion."""
    return [float(c[0]["content"].strip() == a) for c, a in zip(completions, answer, strict=True)]
