"""The reward of my_run.yaml."""


def exact(completions, answer, **columns) -> list[float]:
    """1 for the answer and nothing else. A reward that looks at the picture too names the column: `image`, a PIL image
    for each completion."""
    return [float(c[0]["content"].strip() == a) for c, a in zip(completions, answer, strict=True)]
