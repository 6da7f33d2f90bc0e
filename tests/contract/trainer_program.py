"""A program for transformers' Trainer, with dropout and labels left out, whose lines name its losses and bits."""

import sys
from collections import defaultdict
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
    set_seed,
)

import popdist
from popdist.transformers import Replicated


def sequences(number: int, seed: int) -> list[dict[str, Tensor]]:
    """Return random sequences; of each another number of labels counts."""
    drawn = torch.Generator().manual_seed(seed)
    tokens = torch.randint(64, (number, 12), generator=drawn)
    left_out = torch.arange(12) < torch.randint(8, (number, 1), generator=drawn)
    labels = tokens.masked_fill(left_out, -100)
    return [{"input_ids": token, "labels": label} for token, label in zip(tokens, labels, strict=True)]


def masked(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Collate ``samples``, and leave out labels by chance, as collators for masked words do."""
    batch: dict[str, Tensor] = default_data_collator(samples)
    batch["labels"] = batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.1, -100)
    return batch


class Measured(transformers.Trainer):
    """A Trainer that gathers and logs a metric as the Trainers of TRL do."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._metrics: dict[str, Any] = {"train": defaultdict(list), "eval": defaultdict(list)}

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **options: Any) -> Any:
        """Compute the loss, and note the share of the labels that count."""
        counted = self.accelerator.gather_for_metrics((inputs["labels"] != -100).float().mean()).mean()
        self._metrics["train" if self.model.training else "eval"]["counted"].append(counted.item())
        return super().compute_loss(model, inputs, *args, **options)

    def log(self, logs: dict[str, float], *args: Any) -> None:
        """Log ``logs`` with the means of the metrics."""
        prefix, metrics = ("", self._metrics["train"]) if self.model.training else ("eval_", self._metrics["eval"])
        super().log(logs | {prefix + name: sum(values) / len(values) for name, values in metrics.items()}, *args)
        metrics.clear()


Measured.compute_loss.__module__ = "trl.trainer.sft_trainer"


class Trainer(Replicated, Measured):
    """The Trainer of this program."""


class StopOne(TrainerCallback):
    """Wishes on instance 0 alone to stop after the log of the second step."""

    def on_log(self, _args: Any, state: Any, control: Any, **_kwargs: Any) -> None:
        """Stop on one instance."""
        if popdist.is_main() and state.global_step == 2:
            control.should_training_stop = True


def main(folder: str, checkpoint: str | None) -> None:
    """Train two epochs, from the checkpoint if there is one, and print what the Trainer has logged.

    With the checkpoint ``stop``, one instance stops, and then all train once more.
    """
    set_seed(3)
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None))
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        num_train_epochs=2,
        learning_rate=1e-2,
        warmup_steps=2,
        logging_steps=1,
        eval_strategy="epoch",
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        seed=3,
    )
    data = {"train_dataset": sequences(46, 1), "eval_dataset": sequences(13, 2), "data_collator": masked}
    trainer = Trainer(model=model, args=arguments, **data)
    if checkpoint == "stop":
        trainer.add_callback(StopOne())
        trainer.train()
        checkpoint = None
    output = trainer.train(resume_from_checkpoint=checkpoint)
    if trainer.is_world_process_zero():
        names = ("loss", "eval_loss", "grad_norm", "learning_rate", "counted", "eval_counted")
        lines = [
            f"logged {entry['step']} {[entry.get(name) for name in names]}"
            for entry in trainer.state.log_history[:-1]
        ]
        sys.stdout.write(
            "\n".join([*lines, f"logged {popdist.checksum(model)}", f"loss {output.training_loss}", ""])
        )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
