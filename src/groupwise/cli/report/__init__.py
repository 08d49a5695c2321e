"""`groupwise report`: one HTML page of what a run did, from the files that it left; alone or beside other runs.

    facts      a run directory     -> its configuration, metrics and findings in words
    charts     metrics             -> curves as SVG, and PNG by matplotlib
    samples    rollouts            -> the best and the worst completion of a few prompts, token by token
    page       all of it           -> one file that asks nobody for anything
    build      these, one after the other

Whatever a model or a user wrote is text on that page, never markup: the template escapes every value, what could
reorder or hide text is made visible, and the page's own policy lets no script run and nothing load.
"""
