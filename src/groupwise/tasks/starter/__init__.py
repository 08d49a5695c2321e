"""The starter: a small model of our own, in the wheel, so that everything runs with no download; and one that sees.

    tasks.py               what it was taught, and the prompts to train it further with
    scenes.py              pictures, and questions about them, for the starter that sees
    tokenizer.py           its byte-level tokenizer
    chat_template.jinja    its chat format
    model, model_vl        the weights of `starter` and of `starter-vl`, which tools/starter.py and starter_vl.py make

About two million parameters, trained from scratch on what tasks.py generates, and stopped half good on purpose: a
policy that always fails gives GRPO no signal, and one that always succeeds leaves it nothing to learn.
"""
