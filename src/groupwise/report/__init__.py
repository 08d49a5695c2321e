"""`groupwise report`: one HTML page of what a run did, from the files that it left; alone or beside other runs.

    record    a run directory          -> its configuration, metrics, findings, and where its rollouts are
    charts    metrics                  -> curves
    svg, png  curves                   -> pictures
    samples   rollouts                 -> the best and the worst completion of a few prompts, token by token
    page      all of it                -> one file that asks nobody for anything
    build     these, one after the other

Whatever a model or a user wrote is text on that page, never markup: the template escapes every value, what could
reorder or hide text is made visible, and the page's own policy lets no script run and nothing load.
"""
