"""A training script as a tutorial would print it; `python train.py` runs it on a GPU or on the CPU."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=32)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--epochs", type=int, default=1)
args = parser.parse_args()

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
layer = nn.TransformerEncoderLayer(256, nhead=4, dim_feedforward=1024, batch_first=True)
model = nn.Sequential(nn.Embedding(1000, 256), nn.TransformerEncoder(layer, 4), nn.Flatten(), nn.Linear(64 * 256, 10))
model.to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
data = TensorDataset(torch.randint(0, 1000, (4096, 64)), torch.randint(0, 10, (4096,)))

for epoch in range(args.epochs):
    model.train()
    for tokens, labels in DataLoader(data, batch_size=args.batch_size, shuffle=True):
        loss = nn.functional.cross_entropy(model(tokens.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    right = 0
    with torch.no_grad():
        for tokens, labels in DataLoader(data, batch_size=256):
            right += (model(tokens.to(device)).argmax(-1).cpu() == labels).sum().item()
    print(f"epoch {epoch}: {right / len(data):.3f}")
    torch.save(model.state_dict(), "model.pt")
