"""The script `hf_trainer.py` with megatron_ft: a lost process costs no step.

    megatron-ft launch --groups 2 --config examples/your_own_loop/hf_trainer.json --run-dir runs/sums \
        examples/your_own_loop/hf_trainer_ft.py

The config has the number of microbatches, and that all labels of a step weigh the same, as with the Trainer alone.
"""

import argparse

from sums import TokenSums
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments, set_seed

import megatron_ft
from megatron_ft.integrations.hf_trainer import FaultTolerantTrainer


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", default="sums-hf")
    args = parser.parse_args()

    session = megatron_ft.init(seed=args.seed)
    session.init_distributed()  # before Accelerate looks for a world
    set_seed(args.seed)
    train, held_out = TokenSums([n for n in range(1000) if n % 5]), TokenSums(range(0, 1000, 5))
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=TokenSums.vocab_size, max_position_embeddings=8, **sizes))
    arguments = TrainingArguments(
        output_dir="runs/hf",
        max_steps=args.steps,
        per_device_train_batch_size=8,
        train_sampling_strategy="sequential",
        learning_rate=1e-2,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=50,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=args.device == "cpu",
    )
    trainer = FaultTolerantTrainer(session, model=model, args=arguments, train_dataset=train, eval_dataset=held_out)
    trainer.train()
    trainer.save_model(args.out)


if __name__ == "__main__":
    main()
