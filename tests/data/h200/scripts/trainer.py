import sys, numpy as np, torch
from transformers import BertConfig, BertForMaskedLM, HfArgumentParser, Trainer, TrainingArguments
model = BertForMaskedLM(BertConfig())
class Data(torch.utils.data.Dataset):
    def __len__(self): return 128
    def __getitem__(self, i): return {"input_ids": list(range(1, 60 + (i * 37) % 68)), "labels": list(range(1, 60 + (i * 37) % 68))}
class Collate:
    def __call__(self, rows):
        n = max(len(r["input_ids"]) for r in rows)
        return {"input_ids": torch.tensor([r["input_ids"] + [0] * (n - len(r["input_ids"])) for r in rows]),
                "attention_mask": torch.tensor([[1] * len(r["input_ids"]) + [0] * (n - len(r["input_ids"])) for r in rows]),
                "labels": torch.tensor([r["labels"] + [-100] * (n - len(r["input_ids"])) for r in rows])}
args, = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
trainer = Trainer(model=model, args=args, train_dataset=Data(), eval_dataset=Data(), data_collator=Collate())
trainer.train()
