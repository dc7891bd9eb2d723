import torch, sys
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForMaskedLM, get_scheduler
accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision=sys.argv[1] if len(sys.argv) > 1 else "no")
torch.manual_seed(0)
model = BertForMaskedLM(BertConfig())
opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
ids = torch.randint(0, 30000, (96, 128)); labels = torch.where(torch.rand(96, 128) < 0.15, ids, -100)
train = DataLoader(TensorDataset(ids, labels), batch_size=12, shuffle=True); test = DataLoader(TensorDataset(ids, labels), batch_size=24)
sched = get_scheduler("linear", opt, 0, 100)
model, opt, train, test, sched = accelerator.prepare(model, opt, train, test, sched)
for epoch in range(1):
    model.train()
    for ids, labels in train:
        with accelerator.accumulate(model):
            out = model(input_ids=ids, labels=labels)
            accelerator.backward(out.loss)
            if accelerator.sync_gradients: accelerator.clip_grad_norm_(model.parameters(), 1.0)
            opt.step(); sched.step(); opt.zero_grad()
    model.eval(); losses = []
    for ids, labels in test:
        with torch.no_grad(): out = model(input_ids=ids, labels=labels)
        losses.append(accelerator.gather_for_metrics(out.loss.repeat(24)))
