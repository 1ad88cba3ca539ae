"""`qlora train`: a recipe becomes a model, an optimizer and a run folder, and the loop runs."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from qlora_cli import run_folder
from qlora_cli.build import provenance
from qlora_cli.build.failures import crash_log
from qlora_cli.build.inputs import Inputs, identity, load_recipe_base, placed, read_inputs
from qlora_cli.build.resume import Start, find_start, free_output_dir
from qlora_cli.config.load import LoadedRecipe, dump_recipe
from qlora_cli.console import Console
from qlora_cli.data.batches import in_order, plan_epoch
from qlora_cli.data.collate import Batch, collate
from qlora_cli.data.templates import Tokenized, chat_ids
from qlora_cli.errors import Fault, Interrupted
from qlora_cli.evaluate import loss_over
from qlora_cli.generate import generate
from qlora_cli.model.load import quantized_module_names
from qlora_cli.model.lora import attach, enable_checkpointing, load_trainable, save_adapter
from qlora_cli.model.loss import training_loss
from qlora_cli.optim.paged_adamw import PagedAdamW
from qlora_cli.optim.placement import PagingConfig
from qlora_cli.train.checkpoint import Best, TrainerState, prune, restore_rng
from qlora_cli.train.loop import Hooks, LoopSettings, run_steps, stop_on_signals
from qlora_cli.train.metrics import MetricsFile, StepMetrics
from qlora_cli.train.schedule import Schedule
from qlora_cli.train.steps import StepPlan, count_steps


@dataclass(frozen=True)
class TrainResult:
    """What `qlora train` ends with.

    Attributes:
        run: The run folder.
        steps: Optimizer steps done, those before a resume included.
        paging: What paging cost, one line; empty where no step was made.
        best: Best evaluation, None without validation data.
    """

    run: Path
    steps: int
    paging: str
    best: Best | None

    def as_json(self) -> dict[str, Any]:
        """The document of `qlora train --json`."""
        return {
            "run": str(self.run),
            "adapter": str(self.run / run_folder.ADAPTER),
            "steps": self.steps,
            "paging": self.paging,
            "best": asdict(self.best) if self.best else None,
        }


def train(loaded: LoadedRecipe, console: Console, *, resume: str, command: Sequence[str]) -> TrainResult:
    """Train the run that a recipe describes, from its start or from its newest whole checkpoint.

    Args:
        loaded: A complete recipe.
        console: Told choices, progress and warnings.
        resume: `auto` goes on where the run folder stands; `never` wants a new folder.
        command: The command line, for run.json.

    Returns:
        Where the run lies and how far it went.

    Raises:
        InputError: Before anything is written.
        RunError: If the run fails; `crash.log` in the run folder has the traceback.
        Interrupted: After a stop signal, with a checkpoint saved.
    """
    run = Path(loaded.recipe.output_dir)
    free_output_dir(loaded, run)
    inputs = read_inputs(loaded, console)
    who = identity(inputs)
    start = find_start(loaded, run, who, resume, console)
    plan = step_plan(inputs)
    if start.steps_done >= plan.total_steps:
        console.say(f"{run} is complete: step {start.steps_done} of {plan.total_steps}")
        return TrainResult(run, start.steps_done, "", start.best)
    for note in loaded.notes:
        console.say(note)
    for key, choice in inputs.choices.as_json().items():
        console.say(f"{key}: {choice['value']} ({choice['reason']})")
    console.say(f"loading {loaded.recipe.model.name_or_path}")
    with placed(loaded):
        model = _model(inputs, start)
    with crash_log(run), _optimizer(inputs, model) as optimizer:
        session = _Session(inputs, console, run, who, start, model, optimizer, plan, command)
        session.open_folder()
        return session.train()


def step_plan(inputs: Inputs) -> StepPlan:
    """The micro-batches of every step of a run."""
    recipe = inputs.loaded.recipe
    lengths = [len(example.input_ids) for example in inputs.training.examples]

    def epoch_batches(epoch: int) -> Sequence[Sequence[int]]:
        return plan_epoch(
            len(lengths), lengths, recipe.train.micro_batch_size, seed=recipe.train.seed, epoch=epoch
        )

    processes = int(os.environ.get("WORLD_SIZE", "1"))
    window = recipe.train.gradient_accumulation_steps * processes
    num_batches = len(epoch_batches(0))
    epochs = recipe.train.epochs if recipe.train.max_steps is None else None
    if epochs is None and recipe.train.max_steps is None:
        epochs = 1.0
    total = count_steps(num_batches, window, epochs, recipe.train.max_steps)
    return StepPlan(epoch_batches, window, num_batches, total)


def build_schedule(inputs: Inputs, total_steps: int) -> Schedule:
    """The learning rate of a run of that many steps."""
    spec = inputs.loaded.recipe.schedule
    return Schedule(spec.name, total_steps, spec.warmup_ratio, spec.min_lr_ratio, spec.decay_ratio)


def _model(inputs: Inputs, start: Start) -> Any:
    """The base with its adapter, in training mode on the device."""
    recipe = inputs.loaded.recipe
    base = load_recipe_base(inputs)
    adapter = start.checkpoint or recipe.lora.continue_from
    if adapter is not None:
        model = load_trainable(base, Path(adapter))
    else:
        model = attach(base, inputs.lora, recipe.train.seed)
    if inputs.choices.activation_checkpointing.value == "full":
        enable_checkpointing(model)
    return model


@contextlib.contextmanager
def _optimizer(inputs: Inputs, model: Any) -> Iterator[PagedAdamW]:
    spec = inputs.loaded.recipe.optimizer
    paging = spec.paging
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    optimizer = PagedAdamW(
        named,
        lr=spec.learning_rate,
        betas=spec.betas,
        eps=spec.eps,
        weight_decay=spec.weight_decay,
        state_bits=spec.state_bits,
        min_8bit_size=spec.min_8bit_size,
        paging=PagingConfig(
            backend=paging.backend,
            page_mib=paging.page_mib,
            staging_pages=paging.staging_pages,
            vram_budget_mib=paging.vram_budget_mib,
            prefetch=paging.prefetch,
        ),
    )
    try:
        yield optimizer
    finally:
        optimizer.close()


class _Session:
    """One process's run: the loop's hooks and the state they share."""

    def __init__(
        self,
        inputs: Inputs,
        console: Console,
        run: Path,
        who: dict[str, Any],
        start: Start,
        model: Any,
        optimizer: PagedAdamW,
        plan: StepPlan,
        command: Sequence[str],
    ) -> None:
        self.inputs, self.console, self.run, self.who = inputs, console, run, who
        self.start, self.model, self.optimizer, self.plan = start, model, optimizer, plan
        self.recipe, self.command = inputs.loaded.recipe, command
        self.best = start.best
        dtype = inputs.choices.compute_dtype.value
        self.workers = Accelerator(
            cpu=inputs.device.kind == "cpu", mixed_precision="no" if dtype == "fp32" else dtype
        )

    def open_folder(self) -> None:
        """Write what describes the run, and bring everything to where the checkpoint left it."""
        if self.start.checkpoint is not None:
            self.optimizer.load(self.start.checkpoint / run_folder.OPTIMIZER)
            restore_rng(self.start.checkpoint)
        else:
            torch.manual_seed(self.recipe.train.seed)
        if not self.workers.is_main_process:
            return
        self.run.mkdir(parents=True, exist_ok=True)
        run_folder.write_text(self.run / run_folder.RECIPE, dump_recipe(self.recipe))
        optimizer = {f"optimizer.{key}": asdict(choice) for key, choice in self.optimizer.choices.items()}
        choices = self.inputs.choices.as_json() | optimizer
        document = provenance.run_document(
            command=self.command,
            device=self.inputs.device,
            choices=choices,
            identity=self.who,
            files=dict(self.inputs.files),
            model_folder=self.recipe.model.name_or_path,
            resumed_from=str(self.start.checkpoint.name) if self.start.checkpoint else None,
        )
        run_folder.write_json(self.run / run_folder.RUN, document)
        report = {"train": self.inputs.training.report.as_json()}
        if self.inputs.validation is not None:
            report["validation"] = self.inputs.validation.report.as_json()
        run_folder.write_json(self.run / run_folder.DATA_REPORT, report)

    def train(self) -> TrainResult:
        """Run the loop and leave the adapter."""
        recipe = self.recipe
        settings = LoopSettings(
            learning_rate=recipe.optimizer.learning_rate,
            max_grad_norm=recipe.train.max_grad_norm,
            eval_every_steps=recipe.train.eval_every_steps,
            save_every_steps=recipe.train.save_every_steps,
        )
        schedule = build_schedule(self.inputs, self.plan.total_steps)
        has_evaluation = self.inputs.validation is not None or bool(recipe.train.sample_prompts)
        self.console.say(self._describe())
        with (
            stop_on_signals() as stop,
            self.console.progress(self.plan.total_steps - self.start.steps_done, "training") as progress,
        ):
            steps_done = run_steps(
                self.model,
                self.optimizer,
                self.workers,
                self.plan,
                schedule,
                settings,
                Hooks(
                    batch=lambda indices: self._batch(self.inputs.training.examples, indices),
                    loss=self._loss,
                    evaluate=self._evaluate if has_evaluation else None,
                    save=self._save,
                    logged=self._logger(progress),
                ),
                steps_done=self.start.steps_done,
                stop=stop,
            )
        if steps_done < self.plan.total_steps:
            raise self._interrupted(steps_done, stop.name or "a signal")
        if self.workers.is_main_process:
            provenance.copy_adapter(self.run, self.best.step if self.best else steps_done)
        return TrainResult(self.run, steps_done, self.optimizer.summary(), self.best)

    def _describe(self) -> str:
        trained = sum(p.numel() for p in self.model.parameters() if p.requires_grad)
        examples = len(self.inputs.training.examples)
        backend = self.optimizer.choices["backend"]
        return (
            f"training {trained / 1e6:.1f} M parameters on {examples} examples for {self.plan.total_steps}"
            f" steps; optimizer state: {backend.value} ({backend.reason})"
        )

    def _batch(self, examples: Sequence[Tokenized], indices: Sequence[int]) -> Batch:
        length = self.recipe.data.max_seq_len
        return collate([examples[i] for i in indices], self.inputs.tokenizer.pad_token_id, max_seq_len=length)

    def _loss(self, model: Any, batch: Batch) -> torch.Tensor:
        with self.workers.autocast():
            return training_loss(model, batch)

    def _evaluate(self, step: int) -> dict[str, Any]:
        split = self.inputs.validation
        if split is None:
            return self._samples()
        lengths = [len(example.input_ids) for example in split.examples]
        order = in_order(len(lengths), lengths, self.recipe.train.micro_batch_size)
        batches = (self._batch(split.examples, indices) for indices in order)
        with self.workers.autocast():
            result = loss_over(self.model, batches)
        is_best = self.best is None or result.loss < self.best.eval_loss
        if is_best:
            self.best = Best(step, result.loss)
        record = {"eval_loss": result.loss, "eval_perplexity": result.perplexity, "eval_is_best": is_best}
        return record | self._samples()

    def _samples(self) -> dict[str, Any]:
        """Answers to the recipe's sample prompts, none when it names none."""
        prompts = self.recipe.train.sample_prompts
        if not prompts:
            return {}
        tokenizer = self.inputs.tokenizer
        ids = [chat_ids([{"role": "user", "content": prompt}], tokenizer) for prompt in prompts]
        with self.workers.autocast():
            answers = generate(self.model, tokenizer, ids, max_new_tokens=128, batch_size=len(ids))
        return {"samples": [{"prompt": p, "answer": a} for p, a in zip(prompts, answers, strict=True)]}

    def _logger(self, progress: Any) -> Callable[[StepMetrics], None]:
        every = self.recipe.log.every_steps
        main = self.workers.is_main_process
        file = MetricsFile(self.run / run_folder.METRICS, self.start.steps_done) if main else None

        def logged(metrics: StepMetrics) -> None:
            due = metrics.step % every == 0 or metrics.step == self.plan.total_steps or bool(metrics.eval)
            if file is not None and due:
                file.append(metrics)
            facts = {"loss": f"{metrics.loss:.4f}", "tok/s": f"{metrics.tokens_per_s:.0f}"}
            facts["MiB"] = f"{metrics.peak_mib:.0f}"
            progress.advance(1, **facts)
            if "eval_loss" in metrics.eval:
                self.console.say(f"step {metrics.step}: evaluation loss {metrics.eval['eval_loss']:.4f}")
            for sample in metrics.eval.get("samples", ()):
                self.console.say(f"  {sample['prompt']}\n  -> {sample['answer']}")

        return logged

    def _save(self, step: int) -> None:
        """Write a checkpoint, whole or not at all, and remove those that are not to be kept."""
        if not self.workers.is_main_process:
            return
        with run_folder.atomic_folder(run_folder.checkpoint_path(self.run, step)) as folder:
            save_adapter(self.model, folder, self.inputs.tokenizer, self._record(step))
            self.optimizer.save(folder / run_folder.OPTIMIZER)
            TrainerState(step, self.who, self.best, provenance.versions()).write(folder)
        prune(self.run, self.recipe.train.keep_checkpoints, self.best)

    def _record(self, step: int) -> dict[str, Any]:
        """What merge and eval must know of the training: content of qlora.json."""
        quantization = self.inputs.quantization
        return {
            "base": {
                "name_or_path": self.recipe.model.name_or_path,
                "revision": self.recipe.model.revision,
            },
            "quantization": {
                "scheme": quantization.scheme,
                "double_quant": quantization.double_quant,
                "compute_dtype": quantization.compute_dtype,
                "skip_modules": list(quantization.skip_modules),
                "quantized_modules": quantized_module_names(self.model),
            },
            "step": step,
        }

    def _interrupted(self, step: int, name: str) -> Interrupted:
        path = run_folder.checkpoint_path(self.run, step)
        return Interrupted(
            Fault(
                "interrupted",
                f"{name}: stopped after step {step} of {self.plan.total_steps}; checkpoint {path} is whole",
                hint=f"`{shlex.join(self.command)}` goes on from there",
            )
        )
