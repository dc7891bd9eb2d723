import copy, math, torch, torch.nn as nn, torch.nn.functional as F
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
class Attention(nn.Module):
    def __init__(self, d, h): super().__init__(); self.qkv, self.o, self.h = nn.Linear(d, 3 * d), nn.Linear(d, d), h
    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.h, d // self.h).permute(2, 0, 3, 1, 4)
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, n, d))
class Layer(nn.Module):
    def __init__(self, d, h): super().__init__(); self.a, self.f, self.n1, self.n2 = Attention(d, h), nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d)), nn.LayerNorm(d), nn.LayerNorm(d)
    def forward(self, x): x = x + self.a(self.n1(x)); return x + self.f(self.n2(x))
class GPT(nn.Module):
    def __init__(self, v=50304, d=768, h=12, layers=12, n=512):
        super().__init__(); self.e, self.p = nn.Embedding(v, d), nn.Parameter(torch.zeros(n, d)); self.layers = nn.ModuleList(Layer(d, h) for _ in range(layers)); self.head = nn.Linear(d, v, bias=False); self.head.weight = self.e.weight
    def forward(self, ids):
        x = self.e(ids) + self.p[: ids.shape[1]]
        for layer in self.layers: x = layer(x)
        return self.head(x)
class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4): super().__init__(params, dict(lr=lr))
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None: continue
                s = self.state[p]
                if not s: s["m"] = torch.zeros_like(p)
                p.add_((s["m"] * 0.9 + p.grad * 0.1).sign_(), alpha=-group["lr"]); s["m"].mul_(0.99).add_(p.grad, alpha=0.01)
torch.manual_seed(0)
model = GPT().to(device); ema = copy.deepcopy(model).eval().requires_grad_(False)
opt = Lion(model.parameters())
data = torch.randint(0, 1000, (10000,))
for step in range(5):
    i = torch.randint(0, 9400, (8,)); x = torch.stack([data[j:j + 512] for j in i]).to(device); y = torch.stack([data[j + 1:j + 513] for j in i]).to(device)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        logits = model(x); loss = F.cross_entropy(logits.view(-1, 50304), y.view(-1))
    opt.zero_grad(set_to_none=True); loss.backward(); opt.step()
    with torch.no_grad():
        for a, b in zip(ema.parameters(), model.parameters()): a.lerp_(b, 0.01)
