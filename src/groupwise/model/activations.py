"""Bytes that a micro-batch's forward and backward pass takes: what autograd keeps, and what is on top at the peak.

Counted on the code, and set right by the peaks that benchmarks/memory.py measures (16-bit bases with checkpointing,
the tiles of the head). A layer of the lean forward (`backbone`) keeps, for each of S packed tokens, with hidden size
H, MLP size F, Q query and V key-value features and rank r (in brackets: where it differs):

    norms       2 H                    their inputs                             [trained: in float32, and x / rms(x)]
    projections 4 H + Q + F + 7 r      their inputs     [dropout: in float32, one for each module, as PEFT has it]
    q, k, v     Q + 2 V                where q and k have norms
    MLP         2 F                    gate and up     [3 F where transformers' own runs]

and in attention (`model.attention`), on the padded grids of prompts (P x L cells) and of completions (B x C cells):

    completions 2 Q + 2 V + heads (L + C + 1) a cell: queries, keys, values, output; all scores' exponentials, their
    sum
    prompts     2 Q + 2 V a cell with a fused kernel, Q + 2 V + heads L without
    prefix tree Q + V a token (and q, k, v, unless a norm has kept them); scores computed again (`model.attention`)
    flex        2 Q + 3 V + heads a token, of either kind; scores are computed again, in the kernel (`model.flex`)
    padded      as prompts, of rows with prompt and completion, where a model cannot run packed; without a fused
    kernel
                where it has only its own

What forward kept is all there when the last layer's backward begins; the largest of what that adds comes on top:
gradients around the gated MLP (H + 4 F a token), or around the scores (as many again, and up to 5 Q + 2 V a cell)
less what the MLP has given back, or the tiles of the LM head. With gradient checkpointing forward keeps H a token and
layer, and one layer as above is there again in backward. Other architectures are counted as if they were of this kind
with transformers' modules, which is up to some tens of per cent off; 16-bit ones keep inputs as copies in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from groupwise.model.layer_settings import keys_from, of_layers

TILE_BYTES = 4 << 20  # of the LM head's tiles in float32, `train.forward.TILE_VALUES`

TILE_BYTES_GPU = 256 << 20  # ... `TILE_VALUES_GPU`

TILE_COPIES = 3  # logits, the same over the temperature, probabilities

FUSED_FROM = 256  # tokens of a prompt up to which a CPU scores it without the fused kernel, `model.attention`

LOSS_BYTES = 96  # a loss token's numbers: log-probabilities, advantage, ratio, gradients


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The sizes of a decoder that decide its memory. `value_bytes` is the size of one weight, and of one value that is
    computed; `cached` are the layers with keys and values of their own (None: all).

    `layer` are the parameters of its largest decoder layer, all experts of a mixture; None: those of a dense one's
    matrices. Where weights are quantised, `stored` are the bytes of them all, and `product` the most that a layer's
    take while it is multiplied with.
    """

    parameters: int
    value_bytes: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    lean: bool = True  # runs as `backbone` writes it out
    query_norms: bool = True
    layer: int | None = None
    stored: int | None = None
    product: int = 0
    cached: int | None = None

    @classmethod
    def of(
        cls,
        config: Any,
        *,
        parameters: int,
        value_bytes: int,
        lean: bool = False,
        layer: int | None = None,
        stored: int | None = None,
        product: int = 0,
    ) -> ModelSize:
        """Make it from a transformers text config; what an older architecture does not name has its usual value."""
        hidden, heads = config.hidden_size, getattr(config, "num_attention_heads", None) or 1  # a Mamba has none
        return cls(
            parameters=parameters,
            value_bytes=value_bytes,
            layers=config.num_hidden_layers,
            hidden=hidden,
            intermediate=getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden,
            heads=heads,
            kv_heads=max(each or heads for each in of_layers(config, "num_key_value_heads")),
            head_dim=max(each or hidden // heads for each in of_layers(config, "head_dim")),
            vocabulary=config.vocab_size,
            lean=lean,
            query_norms=config.model_type in ("qwen3", "gemma3_text"),
            layer=layer,
            stored=stored,
            product=product,
            cached=config.num_hidden_layers - len(keys_from(config)),
        )

    @property
    def weights(self) -> int:
        """Return the bytes of all weights."""
        return self.parameters * self.value_bytes if self.stored is None else self.stored

    @property
    def query(self) -> int:
        """Return the query features of a token."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Return the key features of a token, which also has as many value features."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, kw_only=True)
class PackedShape:
    """The shape of a micro-batch: `tokens` in its packed row, of them `loss_tokens`; and the grids of its attention.

    Each prompt is a line of `longest_prompt` cells, each completion one of `longest_completion`; there are as many
    lines for every prompt as the largest group has completions. A prefix tree has no grids, and with FlexAttention
    nothing has.
    """

    tokens: int
    loss_tokens: int
    prompts: int = 0
    prompt_tokens: int = 0
    longest_prompt: int = 0
    prompt_cells: int = 0
    longest_completion: int = 0
    completion_cells: int = 0
    tree: bool = False
    flex: bool = False
    padded: bool = False  # rows for the model's own attention: all are `completion_cells`
    eager: bool = False  # which is written out, without a fused kernel

    @classmethod
    def even(cls, *, prompts: int, prompt: int, group: int, completion: int) -> PackedShape:
        """Return prompts of one length, each with `group` completions of one length."""
        completions = prompts * group * completion
        return cls(
            tokens=prompts * prompt + completions,
            loss_tokens=completions,
            prompts=prompts,
            prompt_tokens=prompts * prompt,
            longest_prompt=prompt,
            prompt_cells=prompts * prompt,
            longest_completion=completion,
            completion_cells=completions,
        )

    @property
    def completion_tokens(self) -> int:
        return self.tokens - self.prompt_tokens


@dataclass(frozen=True, kw_only=True)
class Training:
    """The kind of training: an adapter of `rank`, with dropout or not, or (None) all parameters; and on which
    device."""

    rank: int | None
    dropout: bool = False
    checkpointing: bool = False
    offload: bool = False  # and the layers' inputs are elsewhere meanwhile
    gpu: bool = False


@dataclass(frozen=True, kw_only=True)
class _Layer:
    """Bytes of a layer: kept by its attention and by its MLP, and on top in their backward passes."""

    attention: int
    mlp: int
    above_attention: int  # once the MLP's have been given back
    above_mlp: int


def activation_bytes(model: ModelSize, shape: PackedShape, training: Training) -> int:
    """Return the bytes at the peak of a micro-batch's forward and backward pass, without weights and gradients."""
    layer, last = _layer(model, shape, training), _last(model, shape, training)
    kept = kept_bytes(model, shape, training) + _places(model, shape)
    recomputed = layer.attention + layer.mlp if training.checkpointing else 0
    above = max(layer.above_mlp, layer.above_attention - layer.mlp)
    return max(kept + _head(model, shape, training), kept - last + recomputed + above)


def kept_bytes(model: ModelSize, shape: PackedShape, training: Training) -> int:
    """Return bytes that the forward pass keeps for the backward pass."""
    S, H, value = shape.tokens, model.hidden, model.value_bytes
    kept = _last(model, shape, training) + shape.loss_tokens * LOSS_BYTES + 2 * S * model.head_dim * value  # rotations
    if training.checkpointing:
        return kept + (0 if training.offload else model.layers * S * H * value)
    layer = _layer(model, shape, training)
    below = 0 if training.rank is None else S * _norm(model, training, H)  # the first norm's input needs no gradient
    return kept + model.layers * (layer.attention + layer.mlp) - below


def _places(model: ModelSize, shape: PackedShape) -> int:
    """Return, of each head of each cell, where in the packed row it stands, and the other way round; once for all
    layers."""
    cells = (
        0 if shape.tree or shape.flex or shape.padded else shape.prompt_cells + shape.completion_cells + shape.tokens
    )
    return 8 * cells * (model.heads + model.kv_heads)


def _last(model: ModelSize, shape: PackedShape, training: Training) -> int:
    """Return what is kept behind the last layer: the input of the norm, that of the LM head."""
    return shape.tokens * _norm(model, training, model.hidden) + shape.loss_tokens * model.hidden * model.value_bytes


def _head(model: ModelSize, shape: PackedShape, training: Training) -> int:
    """Return the LM head's tiles and the gradient of its input; of its weight too, twice, where that is trained."""
    most = max(TILE_BYTES_GPU if training.gpu else TILE_BYTES, model.vocabulary * 4)
    tile = min(shape.loss_tokens * model.vocabulary * 4, most)
    weight = 0 if training.rank is not None else 2 * model.vocabulary * model.hidden * model.value_bytes
    return TILE_COPIES * tile + shape.loss_tokens * model.hidden * model.value_bytes + weight


def _layer(model: ModelSize, shape: PackedShape, training: Training) -> _Layer:
    S, H, Q, V, F = shape.tokens, model.hidden, model.query, model.key_value, model.intermediate
    value, exact = model.value_bytes, max(4, model.value_bytes)
    norms = 2 * _norm(model, training, H)
    if model.query_norms:  # which read q and k next to v, in the projection's output
        norms += _norm(model, training, Q + V) + (V * value if _in_its_type(model, training) else 0)
    in_attention = _input(model, training, H, 3) + _input(model, training, Q, 1)
    in_mlp = _input(model, training, H, 2) + _input(model, training, F, 1)
    gates = (2 if model.lean else 3) * F * value
    if not model.lean:
        norms += 2 * H * value
    ranks = 0 if training.rank is None else training.rank * exact
    half = _norm(model, training, H)
    scores, above_scores = _attention(model, shape, training)
    above_mlp = H * value + 4 * F * value - (_input(model, training, F, 1) if value >= 4 else 0)
    return _Layer(
        attention=S * (norms - half + in_attention + 4 * ranks) + scores,
        mlp=S * (half + in_mlp + gates + 3 * ranks),
        above_attention=S * H * value + above_scores,
        above_mlp=S * above_mlp,
    )


def _norm(model: ModelSize, training: Training, width: int) -> int:
    """Return bytes kept of a norm's input, a token."""
    value = model.value_bytes if _in_its_type(model, training) else max(4, model.value_bytes)
    return width * value * (2 if training.rank is None else 1)


def _in_its_type(model: ModelSize, training: Training) -> bool:
    """Return whether inputs of norms are kept in the type that the model computes in, and not as copies in float32."""
    return model.value_bytes >= 4 or (model.lean and training.rank is not None)


def _input(model: ModelSize, training: Training, width: int, modules: int) -> int:
    """Return bytes kept of the input that `modules` linear modules share, a token."""
    if training.rank is None or (_in_its_type(model, training) and not training.dropout):
        return width * model.value_bytes
    return modules * width * 4 * (2 if training.dropout else 1)  # what was dropped, too


def _attention(model: ModelSize, shape: PackedShape, training: Training) -> tuple[int, int]:
    """Return bytes kept, and bytes on top in the backward pass."""
    S, Q, V, value, exact = shape.tokens, model.query, model.key_value, model.value_bytes, max(4, model.value_bytes)
    if shape.flex:  # padded copies, and what belongs to them; the logarithms of sums
        return S * ((2 * Q + 3 * V) * value + 4 * model.heads), S * (3 * Q * value + 2 * V * exact)
    if shape.tree:  # looks at q, k and v in the packed row
        norms_keep = model.query_norms and _in_its_type(model, training)
        in_place = (Q + V if norms_keep else 2 * Q + 3 * V) * value
        return S * in_place, S * (3 * Q * value + 2 * V * exact)
    heads, prompt, completion = model.heads, shape.longest_prompt, shape.longest_completion
    causal, length = (shape.prompt_cells, prompt) if prompt else (shape.completion_cells, completion)
    fused = (training.gpu or length > FUSED_FROM) and not shape.eager
    weights = heads * length * (value if value >= 4 else 4 + value)  # and as they are multiplied
    kept = causal * ((Q + 2 * V) * value + (Q * value if fused else weights))
    above = causal * (4 * Q * value + (0 if fused else 2 * heads * length * exact))
    if prompt and (cells := shape.completion_cells):
        above -= cells * heads * (prompt + completion) * exact  # whose backward pass was before
        kept += cells * (2 * (Q + V) * value + heads * (prompt + completion + 1) * exact)
        both = heads * (prompt * (value if value >= 4 else 4 + value) + completion * value)
        above = max(above, cells * (2 * V * value + max(5 * Q * value + heads * prompt * value, 3 * Q * value + both)))
    return kept, above
