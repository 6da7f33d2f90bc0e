"""A Hugging Face Trainer script that knows nothing of poprun: a small language model with random weights counts.

    poprun -n 2 python examples/with_trainer.py
    poprun -n 2 --num-replicas 4 python examples/with_trainer.py --replicas

With ``--replicas`` the Trainer of popdist trains several replicas in an instance, and
the weights are bitwise equal for any number of instances.

Needs ``pip install 'poprun[neighbours]'``; nothing is downloaded.
"""

import argparse

import torch
import transformers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments, set_seed

VOCABULARY_SIZE = 16


def count_from(starts: Tensor) -> list[dict[str, Tensor]]:
    """Sequences of eight tokens, each token one more than the one before."""
    tokens = (starts.unsqueeze(1) + torch.arange(8)) % VOCABULARY_SIZE
    return [{"input_ids": it, "labels": it} for it in tokens]


def main() -> None:
    """Train for forty steps, evaluate, and print from rank 0."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--replicas", action="store_true")
    trains_replicas = parser.parse_args().replicas
    if trains_replicas:
        import popdist.transformers

    kind = popdist.transformers.Trainer if trains_replicas else transformers.Trainer
    set_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY_SIZE,
        n_positions=8,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=None,
        eos_token_id=None,
    )
    arguments = TrainingArguments(
        max_steps=40,
        learning_rate=0.01,
        per_device_train_batch_size=32,
        report_to=[],
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
    )
    trainer = kind(
        model=GPT2LMHeadModel(config),
        args=arguments,
        train_dataset=count_from(torch.randint(VOCABULARY_SIZE, (2048,))),
        eval_dataset=count_from(torch.arange(VOCABULARY_SIZE)),
    )
    trainer.train()
    loss = trainer.evaluate()["eval_loss"]
    if trainer.is_world_process_zero():
        print(f"world size {arguments.world_size}, evaluation loss {loss:.3f}")
        if trains_replicas:
            print(f"weights {popdist.checksum(trainer.model)}")
    trainer.accelerator.wait_for_everyone()  # no rank ends before rank 0 has printed


if __name__ == "__main__":
    main()
