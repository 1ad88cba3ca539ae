"""The recipe as frozen pydantic models, one a section: names, types, ranges and defaults of every key.

The docstring under a field is its documentation: `docs/recipe.md`, `accepted:` lines and completion come from
here, so no other file lists what a run may say. A key that belongs to a later feature is absent, not ignored.
Keys marked `_filled` may be left out or null in the file: `config.load` writes a value that depends on other
keys or on the file's name, so whoever receives a `Recipe` never meets None there. This module must not know
YAML, other tools' names or torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

MAX_SEED = 2**32 - 1  # numpy's largest seed; torch takes more

Text = Annotated[str, Field(min_length=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]
PageMib = Literal[1, 2, 4, 8, 16, 32, 64, 128, 256]  # a power of two, so that pages tile every budget


def _filled(rule: str) -> Any:
    """A key that the loader fills in where it is left out; `rule` says with what."""
    return Field(json_schema_extra={"filled": rule})


class Section(BaseModel):
    """What all sections share: frozen, no unknown key, no conversion between types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True, allow_inf_nan=False
    )


class Quantization(Section):
    """How the frozen weights of the base are stored and multiplied."""

    scheme: Literal["nf4", "fp4", "none"] = "nf4"
    """Storage of linear layers: 4-bit NF4, 4-bit floating point, or `none` to leave them as they are."""
    double_quant: bool = True
    """Quantize the scale of each block (`absmax`) too: 0.37 bits a weight less."""
    compute_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """Type of the matrix products; `auto` is bf16 where the device is fast in it, else fp32."""
    skip_modules: tuple[Text, ...] = ()
    """Names of linear layers that are not quantized, besides the output layer."""


class Model(Section):
    """The base model."""

    name_or_path: Text
    """A model folder with safetensors (`./model`, `~/model`, or one beside the recipe), else a hub id."""
    revision: Text | None = None
    """Branch, tag or commit of a hub id; null is the default branch."""
    quantization: Quantization = Quantization()
    """How the frozen weights of the base are stored and multiplied."""
    attention: Literal["auto", "sdpa", "eager"] = "auto"
    """Attention implementation; `auto` is sdpa where the model has it."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model; leave it false unless you have read that code."""


class Lora(Section):
    """The adapter that is trained."""

    rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of the two factors: capacity and memory of the adapter grow with it."""
    alpha: Annotated[int | float, Field(gt=0)] = 32
    """Scale of the adapter: its product is multiplied by alpha / rank (rslora: alpha / sqrt(rank))."""
    dropout: Probability = 0.0
    """Share of adapter inputs dropped while training."""
    target_modules: Literal["all-linear"] | Text | Annotated[tuple[Text, ...], Field(min_length=1)] = (
        "all-linear"
    )
    """Layers that get an adapter: `all-linear`, a list of names, or one regular expression on full names."""
    variant: Literal["lora", "rslora"] = "lora"
    """`rslora` scales by alpha / sqrt(rank), which keeps high ranks trainable."""
    init: Literal["default", "gaussian"] = "default"
    """Start of the first factor: Kaiming-uniform (`default`) or normal; the second starts at zero."""
    continue_from: Path | None = None
    """Folder of a PEFT adapter to go on training, counted from the file that names it."""


class TrainSource(Section):
    """One file of training rows."""

    path: Path
    """The data file, counted from the file that names it."""
    format: Literal["auto", "chat", "instruction"] = _filled("`data.format`")
    """Layout of the rows of this file."""
    name: Text = _filled("the file's name without its ending")
    """Name of the source in reports; two sources of one list cannot share it."""


class ValidationSource(TrainSource):
    """One file of validation rows."""

    exact_match: bool = False
    """Each row has one right answer: evaluation generates answers and counts those that equal it."""


class ValidationSplit(Section):
    """Validation rows taken out of the training rows."""

    fraction: Probability
    """Share of the training rows set aside for validation; 0.0 is none."""


class Data(Section):
    """Training and validation rows, and how they become tokens."""

    train: Annotated[tuple[TrainSource, ...], Field(min_length=1)]
    """Files of training rows."""
    validation: ValidationSplit | Annotated[tuple[ValidationSource, ...], Field(min_length=1)] | None = None
    """`{fraction: 0.02}` of the training rows, or a list of files like `train`; null is none."""
    format: Literal["auto", "chat", "instruction"] = "auto"
    """Layout of rows: `chat` has `messages`, `instruction` has `instruction` and `output`; `auto` looks."""
    chat_template: Path | None = None
    """A .jinja file, counted from the file that names it; null takes the tokenizer's own template."""
    loss_on: Literal["assistant", "last_assistant", "all"] = "assistant"
    """Tokens that carry loss: every answer, the last answer of a row, or everything."""
    max_seq_len: Annotated[int, Field(ge=8)] = 2048
    """Longest sequence in tokens."""
    overlong: Literal["error", "drop", "truncate"] = "error"
    """What happens to a row longer than `max_seq_len`; drop and truncate say how many and which rows."""
    packing: Literal[False] = False
    """Several examples in one sequence; not available yet, so only false is accepted."""


class Paging(Section):
    """Where optimizer state lies between steps."""

    backend: Literal["auto", "resident", "host"] = "auto"
    """`resident` keeps all state on the device, `host` pages it to host memory, `auto` chooses."""
    page_mib: PageMib | None = None
    """Size of a page in MiB; null is 16, less where the whole state is small."""
    staging_pages: Annotated[int, Field(ge=2, le=16)] = 4
    """Device slots for pages on the move."""
    vram_budget_mib: Literal["auto"] | Annotated[int, Field(ge=0)] = "auto"
    """Device MiB that state may hold between steps; 0 keeps all of it on the host, `auto` chooses."""
    prefetch: Literal["off", "step"] = "step"
    """When pages start to come in: inside `step` ahead of their turn, or `off`: when their turn comes."""


class Optimizer(Section):
    """AdamW with paged state."""

    name: Literal["paged_adamw_8bit", "paged_adamw_32bit", "paged_adamw"] = "paged_adamw_8bit"
    """The first two name their `state_bits`; `paged_adamw` takes the key."""
    state_bits: Literal[8, 32] = _filled("what `name` says, 8 for `paged_adamw`")
    """Bits of each moment."""
    min_8bit_size: Annotated[int, Field(ge=0)] = 4096
    """Parameters with fewer values keep 32-bit state."""
    learning_rate: Annotated[float, Field(gt=0)] = 2e-4
    """Highest learning rate of the schedule."""
    betas: tuple[Probability, Probability] = (0.9, 0.999)
    """Decay of the first and second moment."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Decoupled weight decay, multiplied by the learning rate."""
    paging: Paging = Paging()
    """Where optimizer state lies between steps."""


class Schedule(Section):
    """Learning rate over the run."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """Shape after warm-up; `wsd` is warm-up, stable, decay."""
    warmup_ratio: Annotated[float, Field(ge=0, le=1)] = 0.03
    """Share of all steps in which the rate rises from zero."""
    min_lr_ratio: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Rate at the end as a share of `optimizer.learning_rate`."""
    decay_ratio: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Share of all steps at the end in which `wsd` decays; other shapes do not read it."""


class Train(Section):
    """Length and shape of the run."""

    epochs: Annotated[float, Field(gt=0)] | None = None
    """Passes over the training rows, not together with `max_steps`; 1 where both are null."""
    max_steps: Annotated[int, Field(ge=1)] | None = None
    """Optimizer steps, not together with `epochs`."""
    micro_batch_size: Annotated[int, Field(ge=1)] = 4
    """Sequences in one forward; memory grows with it."""
    gradient_accumulation_steps: Annotated[int, Field(ge=1)] = 4
    """Forwards per optimizer step; together with `micro_batch_size` the batch of a step."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """Gradients are scaled down to this norm; 0 leaves them as they are."""
    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    """Seed of the adapter's start, the order of rows, dropout and the validation split."""
    activation_checkpointing: Literal["auto", "none", "full"] = "auto"
    """`full` recomputes activations in the backward: less memory, about a third more time."""
    eval_every_steps: Annotated[int, Field(ge=1)] | None = None
    """Evaluate on the validation rows every so many steps; null: only at the end."""
    save_every_steps: Annotated[int, Field(ge=1)] = 100
    """Write a checkpoint every so many steps, and at the end."""
    keep_checkpoints: Annotated[int, Field(ge=1)] = 2
    """Checkpoints that stay on disk; the best one is kept besides."""
    sample_prompts: tuple[Text, ...] = ()
    """Prompts answered at every evaluation."""


class Log(Section):
    """What a run writes down while it goes."""

    every_steps: Annotated[int, Field(ge=1)] = 1
    """Write a line of metrics every so many steps."""


class Recipe(Section):
    """A complete run."""

    model: Model
    """The base model."""
    lora: Lora = Lora()
    """The adapter that is trained."""
    data: Data
    """Training and validation rows, and how they become tokens."""
    optimizer: Optimizer
    """AdamW with paged state."""
    schedule: Schedule = Schedule()
    """Learning rate over the run."""
    train: Train = Train()
    """Length and shape of the run."""
    log: Log = Log()
    """What a run writes down while it goes."""
    output_dir: Path = _filled("`runs/` and the recipe file's name without its ending")
    """The run folder, counted from the current folder."""
