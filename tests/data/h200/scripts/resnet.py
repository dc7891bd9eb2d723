import torch, torchvision, sys
from torch import nn
device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
model = torchvision.models.resnet50(num_classes=10).to(device, memory_format=torch.channels_last if "cl" in sys.argv else torch.preserve_format)
opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
data = torch.utils.data.TensorDataset(torch.randn(96, 3, 224, 224), torch.randint(0, 10, (96,)))
loader = torch.utils.data.DataLoader(data, 32, shuffle=True)
crit = nn.CrossEntropyLoss().to(device)
for epoch in range(2):
    model.train()
    for x, y in loader:
        x, y = x.to(device, non_blocking=True), y.to(device, non_blocking=True)
        out = model(x); loss = crit(out, y)
        opt.zero_grad(); loss.backward(); opt.step()
    model.eval()
    with torch.no_grad():
        for x, y in loader: crit(model(x.to(device)), y.to(device)).item()
