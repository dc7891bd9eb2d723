import torch
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup
torch.manual_seed(0)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = BertForSequenceClassification(BertConfig(num_labels=3)).to(device)
opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
scaler = torch.amp.GradScaler(device.type)
data = TensorDataset(torch.randint(0, 30522, (160, 256)), torch.ones(160, 256, dtype=torch.long), torch.randint(0, 3, (160,)))
loader = DataLoader(data, batch_size=16, shuffle=True, num_workers=2, pin_memory=True)
sched = get_linear_schedule_with_warmup(opt, 1, 100)
for epoch in range(1):
    model.train()
    for ids, mask, y in loader:
        ids, mask, y = ids.to(device, non_blocking=True), mask.to(device), y.to(device)
        with torch.autocast(device.type, dtype=torch.float16):
            loss = model(input_ids=ids, attention_mask=mask, labels=y).loss
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt); scaler.update(); opt.zero_grad(); sched.step()
    model.eval(); right = 0
    with torch.no_grad():
        for ids, mask, y in loader:
            right += (model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.argmax(-1) == y.to(device)).sum().item()
