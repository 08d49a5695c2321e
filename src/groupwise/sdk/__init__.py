"""The SDK: write your own loop over the learner, the engine and the adapter store that everything else uses.

`infra.setup_infra` is where to begin; docs/sdk.md is the guide, examples/loop_by_hand.py the algorithm on a page.
"""
